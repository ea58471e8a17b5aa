"""Routing as Hugging Face computes it, and so the training twin.

Symbols (SGLang 0.5.23), on a CPU only:

- `models.deepseek_v2.MoEGate.forward`: Hugging Face computes DeepSeek's router logits in float32 from bf16 hidden
  states and weights, and so does SGLang on CUDA; elsewhere SGLang rounds them to bf16, which changes who is chosen.
- `models.deepseek_v2.DeepseekV2MoE.__init__`: Hugging Face multiplies the routing weights by `routed_scaling_factor`;
  off CUDA, SGLang multiplies the experts' rounded result. The weights get it here too (see `moe`), so that the layer's
  own factor becomes 1.
- `layers.moe.topk.fused_topk_native`: Hugging Face rounds Qwen3-MoE's routing weights to the model's dtype.
"""

from __future__ import annotations

from typing import Any

import torch

from kt_runtime.sglang_patch.hooks import Hooks

SYMBOLS = (
    "sglang.srt.models.deepseek_v2.MoEGate.forward",
    "sglang.srt.models.deepseek_v2.DeepseekV2MoE.__init__",
    "sglang.srt.layers.moe.topk.fused_topk_native",
)


def install(hooks: Hooks) -> None:
    if hooks.on_cpu:
        hooks.replace(SYMBOLS[0], router_logits)
        hooks.after(SYMBOLS[1], _leave_scaling_to_routing)
        hooks.around(SYMBOLS[2], _rounded_weights)


def router_logits(gate: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """[T, H] -> float32 [T, E]."""
    return torch.nn.functional.linear(hidden_states.float(), gate.weight.float())


def _leave_scaling_to_routing(_result: None, block: Any, *args: Any, **kwargs: Any) -> None:
    if block.experts.should_fuse_routed_scaling_factor_in_topk:
        block.routed_scaling_factor = 1.0


def _rounded_weights(original: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    weights, ids = original(*args, **kwargs)
    hidden_states = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    return weights.to(hidden_states.dtype).float(), ids
