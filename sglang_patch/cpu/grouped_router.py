"""DeepSeek's choice of experts from groups on a CPU, with kt-runtime's kernel.

Symbols (SGLang 0.5.23): `layers.moe.topk.grouped_topk` (DeepSeek-V2) and `.biased_grouped_topk` (DeepSeek-V3, Kimi-K2).
Reason: SGLang compiles both with torch.compile. The compiled sigmoid and softmax differ from PyTorch's in the last bit,
and both depend on the size of the batch. The training twin calls the same function (`kt_runtime.ops.grouped_router`,
`resident.twin.routed.GroupedRouter`).
"""

from __future__ import annotations

from typing import Any

import torch

from kt_runtime.experts.dense import GroupedRouting
from kt_runtime.ops.grouped_router import grouped_top_k
from kt_runtime.sglang_patch.hooks import Hooks

SYMBOLS = (
    "sglang.srt.layers.moe.topk.grouped_topk",
    "sglang.srt.layers.moe.topk.biased_grouped_topk",
)


def install(hooks: Hooks) -> None:
    if hooks.on_cpu:
        hooks.around(SYMBOLS[0], softmax_router)
        hooks.around(SYMBOLS[1], sigmoid_router)


def softmax_router(
    original: Any,
    hidden_states: torch.Tensor,
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    num_expert_group: int | None = None,
    topk_group: int | None = None,
    num_fused_shared_experts: int = 0,
    routed_scaling_factor: float | None = None,
    apply_routed_scaling_factor_on_output: bool | None = False,
    scoring_func: str = "softmax",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [T, E] -> float32 weights [T, K] and int32 ids [T, K], as `sigmoid_router`."""
    if num_fused_shared_experts or gating_output.dtype != torch.float32:
        given = (hidden_states, gating_output, topk, renormalize, num_expert_group, topk_group)
        rest = (num_fused_shared_experts, routed_scaling_factor, apply_routed_scaling_factor_on_output, scoring_func)
        result: tuple[torch.Tensor, torch.Tensor] = original(*given, *rest)
        return result
    scaling = routed_scaling_factor if apply_routed_scaling_factor_on_output else None
    is_sigmoid = scoring_func == "sigmoid"
    return grouped_top_k(
        gating_output, None, _routing(topk, renormalize, num_expert_group, topk_group, scaling, is_sigmoid)
    )


def sigmoid_router(
    original: Any,
    hidden_states: torch.Tensor,
    gating_output: torch.Tensor,
    correction_bias: torch.Tensor,
    topk: int,
    renormalize: bool,
    num_expert_group: int | None = None,
    topk_group: int | None = None,
    num_fused_shared_experts: int = 0,
    routed_scaling_factor: float | None = None,
    apply_routed_scaling_factor_on_output: bool | None = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    if num_fused_shared_experts or gating_output.dtype != torch.float32 or correction_bias.dim() != 1:
        given = (hidden_states, gating_output, correction_bias, topk, renormalize, num_expert_group, topk_group)
        rest = (num_fused_shared_experts, routed_scaling_factor, apply_routed_scaling_factor_on_output)
        result: tuple[torch.Tensor, torch.Tensor] = original(*given, *rest)
        return result
    scaling = routed_scaling_factor if apply_routed_scaling_factor_on_output else None
    routing = _routing(topk, renormalize, num_expert_group, topk_group, scaling, is_sigmoid=True)
    return grouped_top_k(gating_output, correction_bias, routing)


def _routing(
    top_k: int, normalises: bool, groups: int | None, top_groups: int | None, scaling: float | None, is_sigmoid: bool
) -> GroupedRouting:
    return GroupedRouting(
        groups=groups or 1,
        top_groups=top_groups or 1,
        top_k=top_k,
        is_sigmoid=is_sigmoid,
        normalises=bool(normalises),
        scaling=1.0 if scaling is None else float(scaling),
    )
