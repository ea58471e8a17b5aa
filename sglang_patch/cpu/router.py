"""DeepSeek's routing with Hugging Face's arithmetic, which the training twin uses too.

Symbols (SGLang 0.5.23), on a CPU only:

- `models.deepseek_v2.MoEGate.forward`: Hugging Face computes DeepSeek's router logits in float32 from bf16 hidden
  states and weights, as does SGLang on CUDA. Elsewhere SGLang rounds the logits to bf16, which changes expert choices.
- `models.deepseek_v2.DeepseekV2MoE.__init__`: Hugging Face multiplies the routing weights by `routed_scaling_factor`.
  Without CUDA, SGLang multiplies the experts' rounded result. Here the routing weights are scaled too (`moe.py`), so
  the layer's own factor is set to 1.

Qwen3-MoE's routing weights stay float32, as in SGLang, and the twin's router does the same (`resident.twin.routed`).
"""

from __future__ import annotations

from typing import Any

import torch

from kt_runtime.ops.router import float32_logits
from kt_runtime.sglang_patch.hooks import Hooks

SYMBOLS = (
    "sglang.srt.models.deepseek_v2.MoEGate.forward",
    "sglang.srt.models.deepseek_v2.DeepseekV2MoE.__init__",
)


def install(hooks: Hooks) -> None:
    if hooks.on_cpu:
        hooks.replace(SYMBOLS[0], router_logits)
        hooks.after(SYMBOLS[1], _leave_scaling_to_routing)


def router_logits(gate: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """[T, H] -> float32 [T, E]."""
    return float32_logits(hidden_states, gate.weight)


def _leave_scaling_to_routing(_result: None, block: Any, *args: Any, **kwargs: Any) -> None:
    if block.experts.should_fuse_routed_scaling_factor_in_topk:
        block.routed_scaling_factor = 1.0
