"""Shared experts run on the device while the host computes the routed ones.

Symbols (SGLang 0.5.23), on an accelerator only:

- `DeepseekV2MoE.forward_normal`: splits the call of the routed experts (`experts.deferring`) in layers with shared
  experts. SGLang's own way to overlap them, a second stream within one captured graph (`forward_normal_dual_stream`),
  is for full graphs; a break would end the capture of the wrong stream, and SGLang takes `forward_normal` for breakable
  graphs and eager passes.
- `DeepseekV2MoE._forward_shared_experts`: after it, the device has the shared experts in its queue, and the routed ones
  are finished.
- `DeepseekV2MoE.__init__`: sets `moe_runner_config.inplace` of the routed experts to False. SGLang then calls the
  routed experts before the shared ones, not after them. It is also true: the store never writes to its input.

`routed_scaling_factor`: the routing weights arrive scaled (`cpu/moe.py`), and on CUDA SGLang's layer then multiplies no
more. On other accelerators it would, so its own factor is set to 1, as on a CPU (`cpu/router.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from kt_runtime import device
from kt_runtime.sglang_patch.gpu import experts
from kt_runtime.sglang_patch.hooks import Hooks

LAYER = "sglang.srt.models.deepseek_v2.DeepseekV2MoE"
SYMBOLS = (
    f"{LAYER}.__init__",
    f"{LAYER}.forward_normal",
    f"{LAYER}._forward_shared_experts",
)


def install(hooks: Hooks) -> None:
    if not hooks.on_cpu:
        hooks.after(SYMBOLS[0], routed_experts_first)
        hooks.around(SYMBOLS[1], forward)
        hooks.after(SYMBOLS[2], after_shared_experts)


def routed_experts_first(_result: None, block: Any, *args: Any, **kwargs: Any) -> None:
    if not _is_in_store(block):
        return
    block.experts.moe_runner_config.inplace = False
    if block.experts.should_fuse_routed_scaling_factor_in_topk:
        block.routed_scaling_factor = 1.0


def forward(original: Callable[..., Any], block: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    with experts.deferring() if _overlaps(block, hidden_states, **kwargs) else nullcontext():
        return original(block, hidden_states, *args, **kwargs)


def _overlaps(block: Any, hidden_states: torch.Tensor, skip_shared_experts: bool = False, **_: Any) -> bool:
    """SGLang passes `skip_shared_experts` by name."""
    has_shared = block.shared_experts is not None and hidden_states.shape[0] > 0 and not skip_shared_experts
    return has_shared and _is_in_store(block) and not device.is_host(hidden_states)


def _is_in_store(block: Any) -> bool:
    return hasattr(block.experts, "experts_forward")


def after_shared_experts(_result: Any, block: Any, *args: Any, **kwargs: Any) -> None:
    experts.finish_deferred()
