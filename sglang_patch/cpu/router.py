"""The choice of experts with the arithmetic of the training twin.

Symbols (SGLang 0.5.23), where no CUDA kernel runs:

- `models.deepseek_v2.MoEGate.forward`: Hugging Face computes DeepSeek's router logits in float32 from bf16 hidden
  states and weights, as does SGLang on CUDA. Elsewhere SGLang rounds the logits to bf16, which changes expert choices.
- `models.deepseek_v2.DeepseekV2MoE.__init__`: Hugging Face multiplies the routing weights by `routed_scaling_factor`.
  Without CUDA, SGLang multiplies the experts' rounded result. Here the routing weights are scaled too (`moe.py`), so
  the layer's own factor is set to 1.
- `models.glm4_moe.Glm4MoeGate.forward` and `.Glm4MoeSparseMoeBlock.__init__`, and those of `.glm4_moe_lite`: the same
  for GLM-4.5 to 4.7 and GLM-4.7-Flash, whose routers have a matrix in float32.
- `layers.moe.topk.fused_topk_native`: the softmax router of Qwen3-MoE, Mixtral and OLMoE, and the sigmoid router with a
  bias of MiniMax-M2. kt-runtime's kernel chooses the experts here, in the twin (`resident.twin.routed`) and in the
  native step (`step.py`), so that all of them get the same bits. The routing weights are float32, as in SGLang.
"""

from __future__ import annotations

from typing import Any

import torch

from kt_runtime import device
from kt_runtime.experts import dense
from kt_runtime.experts.dense import GroupedRouting
from kt_runtime.ops.grouped_router import grouped_top_k
from kt_runtime.ops.router import float32_logits, softmax_top_k
from kt_runtime.sglang_patch.hooks import Hooks

SYMBOLS = (
    "sglang.srt.models.deepseek_v2.MoEGate.forward",
    "sglang.srt.models.deepseek_v2.DeepseekV2MoE.__init__",
    "sglang.srt.layers.moe.topk.fused_topk_native",
    "sglang.srt.models.glm4_moe.Glm4MoeGate.forward",
    "sglang.srt.models.glm4_moe.Glm4MoeSparseMoeBlock.__init__",
    "sglang.srt.models.glm4_moe_lite.Glm4MoeLiteGate.forward",
    "sglang.srt.models.glm4_moe_lite.Glm4MoeLiteSparseMoeBlock.__init__",
)


def install(hooks: Hooks) -> None:
    if not hooks.has_cuda_kernels:
        hooks.replace(SYMBOLS[0], router_logits)
        hooks.after(SYMBOLS[1], _leave_scaling_to_routing)
        hooks.around(SYMBOLS[2], choose_experts)
        for gate, block in (SYMBOLS[3:5], SYMBOLS[5:7]):
            hooks.replace(gate, router_logits)
            hooks.after(block, _leave_scaling_to_routing)


def router_logits(gate: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """[T, H] -> float32 [T, E]."""
    return float32_logits(hidden_states, gate.weight)


def _leave_scaling_to_routing(_result: None, block: Any, *args: Any, **kwargs: Any) -> None:
    if block.experts.should_fuse_routed_scaling_factor_in_topk:
        block.routed_scaling_factor = 1.0


def choose_experts(
    original: Any,
    hidden_states: torch.Tensor,
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    correction_bias: torch.Tensor | None = None,
    scoring_func: str = "softmax",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [T, E] -> weights [T, K] and expert ids [T, K]."""
    if scoring_func == "softmax" and correction_bias is None and gating_output.dtype in dense.DTYPES:
        return softmax_top_k(gating_output, topk, renormalize)
    if _is_biased_sigmoid(gating_output, correction_bias, scoring_func):
        return grouped_top_k(gating_output, correction_bias, _one_group(topk, renormalize))
    result: tuple[torch.Tensor, torch.Tensor] = original(
        hidden_states, gating_output, topk, renormalize, correction_bias, scoring_func
    )
    return result


def _is_biased_sigmoid(logits: torch.Tensor, bias: torch.Tensor | None, scoring_func: str) -> bool:
    """Whether `ops.grouped_router` computes this router; its kernel is a CPU's, and takes float32."""
    is_plain = bias is not None and bias.dim() == 1 and logits.dtype == torch.float32
    return scoring_func == "sigmoid" and is_plain and device.is_host(logits)


def _one_group(top_k: int, normalises: bool) -> GroupedRouting:
    return GroupedRouting(
        groups=1, top_groups=1, top_k=top_k, is_sigmoid=True, normalises=bool(normalises), scaling=1.0
    )
