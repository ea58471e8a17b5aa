"""The twin's routed part: experts computed by the expert store, and routers with serving's arithmetic.

Shapes: T tokens, K experts per token, E experts, H hidden, R LoRA rank.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from kt_runtime.experts import ExpertStore, LoraSlot, routed_experts, routed_experts_for_backward
from kt_runtime.experts.dense import GroupedRouting
from kt_runtime.ops.grouped_router import grouped_top_k
from kt_runtime.ops.matmul import frozen_linear, rounded
from kt_runtime.ops.router import float32_logits, softmax_top_k
from kt_runtime.ranks import Exchange, TrainedExperts
from kt_runtime.resident.twin.replay import LayerRoutes


class RoutedExperts(nn.Module):
    """Replaces Hugging Face's fused expert module; has no parameters of its own.

    `adapters`: LoRA by key, float32 masters. Forward rounds the masters to the model's dtype, as serving's copies are;
    gradients ignore this rounding. `active`: key of the active adapter, None for the base alone. `drops_out`: dropout
    is on, with a seed from torch's generator. `padding` [T]: True for padding rows, which cost nothing and result in
    zeros; None: no padding. `needs_output` False: the whole result is zeros, for recomputation; backward computes the
    activations itself.

    `exchange`: of several ranks, each of which has an equal part of the experts in its store, and of the adapters.
    """

    def __init__(self, store: ExpertStore, layer: int, exchange: Exchange | None = None) -> None:
        super().__init__()
        own = store.layers[layer]
        total = store.shape.num_experts * (1 if exchange is None else exchange.share.num_ranks)
        self._layer = own if exchange is None else TrainedExperts(own, exchange, total)
        self.adapters: dict[str, LoraSlot] = {}
        self.active: str | None = None
        self.drops_out = False
        self.padding: torch.Tensor | None = None
        self.needs_output = True

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """[T, H], [T, K], [T, K] -> [T, H]: the weighted sum of each token's experts."""
        if self.padding is not None:
            ids = ids.masked_fill(self.padding[:, None], -1)
        slot = self.adapters.get(self.active) if self.active is not None else None
        if slot is not None:
            masters = slot.tensors()
            slot = slot.with_tensors([None if master is None else rounded(master, hidden.dtype) for master in masters])
            slot = replace(slot, seed=_drawn_seed()) if slot.dropout and self.drops_out else replace(slot, dropout=0.0)
        compute = routed_experts if self.needs_output else routed_experts_for_backward
        return compute(self._layer, hidden, ids, weights.float(), slot)


def _drawn_seed() -> int:
    return int(torch.randint(2**63 - 1, (), device="cpu"))


class SoftmaxRouter(nn.Module):
    """A softmax router over all experts as serving computes it (`kt_runtime.ops.router`): Qwen3-MoE, Mixtral, OLMoE,
    gpt-oss, whose logits have a bias.

    Unlike Hugging Face's routers, this one keeps the routing weights in float32 instead of rounding them to the model's
    dtype. In a float32 model both are equal. `routes`: recorded experts of the present call's tokens.
    """

    routes: LayerRoutes | None = None

    def __init__(self, num_experts: int, hidden: int, top_k: int, *, normalises: bool, has_bias: bool = False) -> None:
        super().__init__()
        self.top_k, self.normalises = top_k, normalises
        self.weight = nn.Parameter(torch.empty(num_experts, hidden))
        self.bias = nn.Parameter(torch.empty(num_experts)) if has_bias else None

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits [T, E], weights [T, K], ids [T, K], as Hugging Face's router returns them."""
        logits = frozen_linear(hidden, self.weight, self.bias)
        weights, ids = softmax_top_k(logits, self.top_k, self.normalises)
        replayed = None if self.routes is None else self.routes.instead_of(ids)
        if replayed is not None:
            weights, ids = softmax_top_k(logits, self.top_k, self.normalises, replayed)
        return logits, weights, ids


class GroupedRouter(nn.Module):
    """Replaces the class of Hugging Face's routers of DeepSeek and GLM in place; their attributes stay unchanged.

    As `sglang_patch.cpu.grouped_router` computes it: logits and weights in float32, for every dtype of the model.
    `routes`: as of `SoftmaxRouter`.
    """

    routes: LayerRoutes | None = None

    weight: torch.Tensor
    top_k: int
    topk_group: int | None
    num_group: int | None
    routed_scaling_factor: float
    is_sigmoid: bool | None = None
    """None: if there is a bias."""

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits [T, E], weights [T, K], ids [T, K], as Hugging Face's routers return them."""
        return self.route(hidden, getattr(self, "e_score_correction_bias", None))  # DeepSeek-V3's and GLM's

    def route(self, hidden: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        routing = GroupedRouting(
            groups=self.num_group or 1,
            top_groups=self.topk_group or 1,
            top_k=self.top_k,
            is_sigmoid=bias is not None if self.is_sigmoid is None else self.is_sigmoid,
            normalises=bool(getattr(self, "norm_topk_prob", False)),
            scaling=float(self.routed_scaling_factor),
        )
        logits = float32_logits(hidden.flatten(0, -2), self.weight)
        weights, ids = grouped_top_k(logits, bias, routing)
        replayed = None if self.routes is None else self.routes.instead_of(ids)
        if replayed is not None:
            weights, ids = grouped_top_k(logits, bias, routing, replayed)
        return logits, weights, ids


class BiasedRouter(GroupedRouter):
    """As `GroupedRouter`, for MiniMax-M2's router: one group, weights that sum to 1, and the MLP has the bias."""

    num_group = topk_group = 1
    norm_topk_prob = True
    routed_scaling_factor = 1.0

    def forward(  # type: ignore[override]
        self, hidden: torch.Tensor, bias: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.route(hidden, bias)


class SigmoidRouter(GroupedRouter):
    """As `GroupedRouter`, for Llama 4's router: the sigmoids of the largest logits, without a bias."""

    num_group = topk_group = 1
    norm_topk_prob = False
    routed_scaling_factor = 1.0
    is_sigmoid = True


GROUPED_ROUTERS: dict[str, type[GroupedRouter]] = {
    "DeepseekV2TopkRouter": GroupedRouter,
    "DeepseekV3TopkRouter": GroupedRouter,
    "Glm4MoeTopkRouter": GroupedRouter,
    "Glm4MoeLiteTopkRouter": GroupedRouter,
    "MiniMaxM2TopKRouter": BiasedRouter,
    "Llama4Router": SigmoidRouter,
    **dict.fromkeys(("DeepseekV32TopkRouter", "GlmMoeDsaTopkRouter"), GroupedRouter),
}
"""What replaces Hugging Face's classes, by their names."""


def grouped_router(module: nn.Module) -> type[GroupedRouter] | None:
    return GROUPED_ROUTERS.get(type(module).__name__)
