"""The router: chooses each token's experts. T tokens, H hidden, E experts, K experts per token.

DeepSeek: logits in float32 from bf16 hidden states and weights, as Hugging Face's `DeepseekV3TopkRouter` computes them.
Qwen3-MoE: logits in the model's dtype, routing weights in float32, as SGLang 0.5.23 computes them
(`sglang.srt.layers.moe.topk.fused_topk_torch_native`). On a CPU training and serving call kt-runtime's kernel, which
the native step calls too. It chooses the first of equal bf16 logits; torch does not define which of them it chooses.

`ids` may be given instead of chosen (routing replay). Their weights are the same function of the logits, with the same
bits where the router itself would choose them.
"""

from __future__ import annotations

from typing import Any

import torch

from kt_runtime import device
from kt_runtime.experts import dense
from kt_runtime.ops.matmul import product


def float32_logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[T, H], [E, H] -> float32 [T, E]; a token's logits do not depend on the other tokens."""
    return product(hidden.float(), weight.float().T)


def softmax_top_k(
    logits: torch.Tensor, top_k: int, normalise: bool, ids: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [T, E] -> routing weights float32 [T, K] and expert ids [T, K]. `normalise`: the K weights sum to 1.

    Larger weights come first; of equal logits the first is chosen. `ids` [T, K]: the experts are given, and returned.
    """
    return _SoftmaxTopK.apply(logits, top_k, normalise, ids)


class _SoftmaxTopK(torch.autograd.Function):
    """On a CPU kt-runtime's kernel chooses (`kt_runtime.experts.dense`), for serving and training alike."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, top_k: int, normalise: bool, ids: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if ids is not None:
            weights, ids = _weights_of(logits, ids, normalise), ids.clone()
        elif device.is_host(logits) and logits.dtype in dense.DTYPES:
            weights, ids = dense.choose_experts(logits, top_k, normalise)
        else:
            weights, ids = torch.topk(logits.float().softmax(-1), top_k, dim=-1)
            if normalise:
                weights = weights / weights.sum(-1, keepdim=True)
        ctx.normalise = normalise
        ctx.save_for_backward(logits, weights, ids)
        ctx.mark_non_differentiable(ids)
        return weights, ids

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits, weights, ids = ctx.saved_tensors
        ids, by_weights = ids.long(), grads[0]
        mean = torch.linalg.vecdot(by_weights, weights).unsqueeze(-1)
        if ctx.normalise:  # the weights are a softmax over the chosen logits
            chosen = weights * (by_weights - mean)
            return torch.zeros_like(logits).scatter_(-1, ids, chosen.to(logits.dtype)), None, None, None
        by_logits = logits.float().softmax(-1).mul_(-mean)
        return by_logits.scatter_add_(-1, ids, weights * by_weights).to(logits.dtype), None, None, None


def _weights_of(logits: torch.Tensor, ids: torch.Tensor, normalise: bool) -> torch.Tensor:
    if device.is_host(logits) and logits.dtype in dense.DTYPES:
        return dense.weigh_experts(logits, ids, normalise)
    weights = logits.float().softmax(-1).gather(-1, ids.long())
    return weights / weights.sum(-1, keepdim=True) if normalise else weights
