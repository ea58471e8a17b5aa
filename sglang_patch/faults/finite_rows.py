"""Rows that are not finite (NaN or Inf) are masked, and the request that computed them ends; its neighbours go on.

An adapter may hold finite numbers so large that what is computed with them is not. The rows of such a request stay its
own: attention, products and experts compute each token by itself. But the expert store refuses a call in which one row
is not finite, sampling refuses the whole batch, and pages of keys would enter the prefix cache. So rows are looked at
where that costs one reading of what was just written, replaced by zeros, and noted:

- the experts' input, when the store has refused it (`moe.experts_forward`); a call without such rows costs nothing;
- new keys and values on a CPU, in batches with an adapter (`attention`);
- the last hidden states, before the head, and the logits of each request, after bias and grammar.

SGLang 0.5.23 symbols and reasons:

- `ModelRunner.forward`: begins the notes of a forward pass.
- `LogitsProcessor.forward`, `Sampler._preprocess_logits`: where hidden states and logits are seen whole.
- `Req.update_finish_state`: a token that was sampled from masked logits is not an answer.

After the pass `fault_batches` has the noted requests marked. A prefill discards the output of a request with SGLang's
`discard_output_reason`, a decode step ends one with `to_finish`; neither keeps its pages (`skip_radix_cache_insert`).

Training looks at its numbers itself: it fails with NumericsError.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import torch

from kt_runtime.sglang_patch.hooks import Hooks

logger = logging.getLogger(__name__)

SYMBOLS = (
    "sglang.srt.model_executor.model_runner.ModelRunner.forward",
    "sglang.srt.layers.logits_processor.LogitsProcessor.forward",
    "sglang.srt.layers.sampler.Sampler._preprocess_logits",
    "sglang.srt.managers.schedule_batch.Req.update_finish_state",
    "sglang.srt.managers.schedule_batch.FINISH_ABORT",
    "sglang.srt.lora.utils.generate_sequence_lengths",
)

_notes: Notes | None = None  # of the forward pass that runs, or has just run, in this process


class Notes:
    """Which rows of one forward pass were not finite. `lengths` [B]: tokens of each request, in the batch's order."""

    def __init__(self, lengths: list[int], has_adapters: bool) -> None:
        self.has_adapters = has_adapters
        self._lengths = lengths
        self._rows = torch.zeros(sum(lengths), dtype=torch.bool)
        self._requests = torch.zeros(len(lengths), dtype=torch.bool)

    def note_rows(self, bad: torch.Tensor) -> None:
        """`bad`: bool [T], one for each token of the pass."""
        self._rows |= bad.cpu()

    def note_requests(self, bad: torch.Tensor) -> None:
        """`bad`: bool [B]."""
        self._requests |= bad.cpu()

    def requests(self) -> list[int]:
        """Places in the batch of the requests with a row that was not finite."""
        by_rows = [bool(rows.any()) for rows in self._rows.split(self._lengths)]
        return [place for place, bad in enumerate(self._requests.tolist()) if bad or by_rows[place]]


def install(hooks: Hooks) -> None:
    forward, logits, preprocess, update_finish_state = SYMBOLS[:4]
    hooks.around(forward, _note_forward)
    hooks.around(logits, _mask_hidden_states)
    hooks.after(preprocess, _mask_logits)
    hooks.after(update_finish_state, _drop_masked_token)


def present() -> Notes | None:
    """The notes of the serving pass that runs in this process; None outside of one, as while training."""
    return _notes


def bad_rows(matrix: torch.Tensor) -> torch.Tensor | None:
    """Bool [T]: rows of [T, ...] that are not finite; None if all are. One pass over the numbers where they are."""
    if bool(torch.isfinite(matrix.sum())):
        return None
    bad = ~torch.isfinite(matrix.reshape(matrix.shape[0], -1)).all(-1)
    return bad if bool(bad.any()) else None  # a sum of large finite numbers may overflow


def masked(matrix: torch.Tensor) -> torch.Tensor:
    """`matrix` [T, ...] of the running pass with zeros in the rows that are not finite, which are noted."""
    bad = bad_rows(matrix)
    if bad is None or _notes is None:
        return matrix
    _notes.note_rows(bad)
    return matrix.masked_fill(bad.view(-1, *[1] * (matrix.dim() - 1)), 0)


def _note_forward(original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    global _notes
    from sglang.srt.lora.utils import generate_sequence_lengths

    lengths = generate_sequence_lengths(forward_batch, device="cpu").tolist()
    lora_ids = getattr(forward_batch, "lora_ids", None) or ()
    _notes = Notes(lengths, any(lora_id is not None for lora_id in lora_ids))
    return original(runner, forward_batch, *args, **kwargs)


def _mask_hidden_states(
    original: Callable[..., Any], processor: Any, input_ids: Any, hidden_states: Any, *args: Any, **kwargs: Any
) -> Any:
    if _notes is not None and isinstance(hidden_states, torch.Tensor):
        hidden_states = masked(hidden_states)
    return original(processor, input_ids, hidden_states, *args, **kwargs)


def _mask_logits(logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """[B, V], in place. A grammar's -inf is no fault, as long as one token is left."""
    bad = ~torch.isfinite(logits.amax(-1))
    if _notes is not None and bool(bad.any()):
        _notes.note_requests(bad)
        logits[bad] = 0
    return logits


def mark_requests(scheduler: Any, batch: Any) -> None:
    """Ends the requests that the pass just run has noted; forgets its notes."""
    notes = _notes
    forget()
    for place in notes.requests() if notes is not None else ():
        _end(scheduler, batch, batch.reqs[place])


def forget() -> None:
    """No forward pass runs any more."""
    global _notes
    _notes = None


def _end(scheduler: Any, batch: Any, req: Any) -> None:
    """The request is ended while the batch's result is processed, or its next chunk is left out."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    message = f"{_source(scheduler, req)} computed numbers that are not finite (NaN or Inf) for this request"
    logger.error("request %s ends: %s", req.rid, message)
    reason = FINISH_ABORT(message, HTTPStatus.UNPROCESSABLE_ENTITY, "UnprocessableEntity")
    reason.is_not_finite = True
    req.skip_radix_cache_insert = True
    if batch.forward_mode.is_extend():
        req.discard_output_reason = reason
        if scheduler.chunked_req is req:
            scheduler._pending_chunked_abort_req = req
    else:
        req.to_finish = reason


def _source(scheduler: Any, req: Any) -> str:
    if req.lora_id is None:
        return "the model"
    reference = scheduler.tp_worker.model_runner.lora_manager.lora_refs.get(req.lora_id)
    name = req.lora_id if reference is None else reference.lora_name.rpartition("#")[0] or reference.lora_name
    return f"adapter {name!r}"


def _drop_masked_token(result: None, req: Any, new_accepted_len: int = 1) -> None:
    if getattr(req.finished_reason, "is_not_finite", False) and req.finished_len is None:
        req.finished_len = len(req.output_ids) - new_accepted_len
