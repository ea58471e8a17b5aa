"""Which graph of SGLang's is being replayed, and how many of its rows are tokens of requests.

Symbols (SGLang 0.5.23): `BreakableCudaGraphBackend.replay` is wrapped; `get_prefill_raw_num_tokens`,
`is_in_prefill_graph_scope` and `is_in_breakable_cuda_graph` are called. Reason: SGLang pads a batch to the next
captured size, and an eager break between two captured segments gets the tensors of that size. Experts on a CPU must not
compute the padding: a decode step of 5 requests would read the experts of 8.

What a captured graph relies on, and why training, publishing and evictions leave it alone:

- A graph holds addresses. Parameters of the model never move: the twin's parameters are views of them
  (`resident/twin/model.py`), training updates its own float32 masters, and no code assigns to a parameter's `data`.
- SGLang allocates the LoRA pool once. An adapter is copied into a slot in place (`lora/pool.py`), in the order of the
  stream that runs the batch, after the batch before it. Publishing and dropping change tables of the host only.
  Captured kernels of dense LoRA read slots, ranks and factors from buffers that SGLang refreshes for each batch.
- LoRA of routed experts is looked up when a break runs (`lora/experts.py`), never when it is captured. Its buffers are
  in host memory and read within the break only: when the next batch writes a slot, nothing reads it.
- The eager breaks of a batch have all run when SGLang's `run_batch` returns, since the host runs them itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kt_runtime.sglang_patch.hooks import Hooks

GRAPH = "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph"
PREFILL = "sglang.srt.model_executor.runner_utils.prefill_graph"
SYMBOLS = (
    "sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend.BreakableCudaGraphBackend.replay",
    f"{PREFILL}.get_prefill_raw_num_tokens",
    f"{PREFILL}.is_in_prefill_graph_scope",
    f"{GRAPH}.context.is_in_breakable_cuda_graph",
)


@dataclass(frozen=True, slots=True)
class Replay:
    """`num_tokens`: rows that belong to requests. Rows of padding follow them."""

    num_tokens: int


_replay: Replay | None = None


def install(hooks: Hooks) -> None:
    if not hooks.on_cpu:
        hooks.around(SYMBOLS[0], replay)


def replay(original: Callable[..., Any], backend: Any, shape_key: Any, static_forward_batch: Any, **kwargs: Any) -> Any:
    """SGLang passes the batch of the requests to a decode step, and a padded copy to a prefill, whose number of tokens
    it keeps separately. A decode step has one token of each request."""
    global _replay
    from sglang.srt.model_executor.runner_utils.prefill_graph import get_prefill_raw_num_tokens

    of_prefill = get_prefill_raw_num_tokens()
    before = _replay
    _replay = Replay(int(static_forward_batch.batch_size if of_prefill is None else of_prefill))
    try:
        return original(backend, shape_key, static_forward_batch, **kwargs)
    finally:
        _replay = before


def current() -> Replay | None:
    """The graph that is being replayed; None in an eager pass, and while graphs are captured."""
    return _replay


def is_preparing() -> bool:
    """A graph is being captured, or its eager warm-up runs: the results of this pass are not read."""
    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.context import is_in_breakable_cuda_graph

    return _replay is None and bool(is_in_breakable_cuda_graph())


def is_prefill() -> bool:
    """The graph is one of a prefill, not of a decode step."""
    from sglang.srt.model_executor.runner_utils.prefill_graph import is_in_prefill_graph_scope

    return bool(is_in_prefill_graph_scope())
