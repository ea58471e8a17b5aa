"""DeepSeek's choice of experts from groups, on a CPU, for serving and training alike. T tokens, E experts, K chosen.

kt-runtime's kernel chooses (csrc/ops/router/grouped_router.h states the formula). PyTorch's sigmoid and softmax depend
on the size of the batch in the last bit, and SGLang compiles its router, whose code differs from PyTorch's once more.
"""

from __future__ import annotations

from typing import Any

import torch

from kt_runtime.experts import dense
from kt_runtime.experts.dense import GroupedRouting

SUM_EPSILON = 1e-20  # as in the kernel


class _GroupedTopK(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        bias: torch.Tensor | None,
        routing: GroupedRouting,
        ids: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if ids is None:
            weights, ids = dense.choose_from_groups(logits, bias, routing)
        else:
            weights, ids = dense.weigh_from_groups(logits, ids, routing), ids.clone()
        ctx.routing = routing
        ctx.save_for_backward(logits, ids)
        ctx.mark_non_differentiable(ids)
        return weights, ids

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits, ids = ctx.saved_tensors
        routing, ids, by_chosen = ctx.routing, ids.long(), grads[0] * ctx.routing.scaling
        scores = _sigmoid(logits) if routing.is_sigmoid else logits.softmax(-1)
        chosen = scores.gather(-1, ids)
        if routing.normalises:
            total = chosen.sum(-1, keepdim=True) + SUM_EPSILON
            mean = torch.linalg.vecdot(by_chosen, chosen).unsqueeze(-1) / total
            by_chosen = (by_chosen - mean) / total
        by_scores = torch.zeros_like(logits).scatter_(-1, ids, by_chosen)
        if routing.is_sigmoid:
            return by_scores.mul_(scores).mul_(1 - scores), None, None, None
        mean = torch.linalg.vecdot(by_scores, scores).unsqueeze(-1)
        return by_scores.sub_(mean).mul_(scores), None, None, None


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    """An element's bits do not depend on the other elements. Those of `torch.sigmoid` do: its code for whole vectors
    differs from its code for a thread's remaining elements."""
    return (-x).exp_().add_(1).reciprocal_()


def grouped_top_k(
    logits: torch.Tensor, bias: torch.Tensor | None, routing: GroupedRouting, ids: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [T, E] float32 and bias [E] -> routing weights float32 [T, K] and expert ids int32 [T, K].

    A token's choice depends on its own logits alone. The weights have a gradient for the logits; the choice has none.
    `ids` [T, K]: the experts are given, and returned; groups and bias, which only choose, have no part then.
    """
    return _GroupedTopK.apply(logits, None if bias is None else bias.float(), routing, ids)
