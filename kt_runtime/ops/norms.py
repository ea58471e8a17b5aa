"""RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467) with Hugging Face's rounding, and its gradient.

Forward runs the same steps as transformers 5's `Qwen3MoeRMSNorm`, `DeepseekV2RMSNorm` and `DeepseekV3RMSNorm`:
statistics in float32, then the normalised state is rounded to x's dtype, then multiplied by the weight. On a CPU
kt-runtime's own kernel runs the steps (`kt_runtime.experts.dense`), for serving and training alike; its sum of squares
has one order, so that a token's result does not depend on the other tokens of a call.

Autograd would save a tensor for each step and make one to three passes over memory for each in backward. The weight is
frozen, so with the output's gradient g and the weight w the whole gradient is

    d x = r (g w - n mean(g w n)),    r = 1 / sqrt(mean(x^2) + eps),    n = r x

Backward computes it in float32 from g, w, x and r, on a CPU with kt-runtime's kernel; forward saves no other tensor.
"""

from __future__ import annotations

from typing import Any

import torch

from kt_runtime.experts import dense


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """weight * x / rms(x), without a gradient: x [..., H], weight [H] -> [..., H] in x's dtype."""
    return _normalised(x, weight, eps)[0]


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """total = x + residual, rounded to their dtype -> (`rms_norm` of total, total)."""
    if dense.is_supported(x, weight) and residual.dtype == x.dtype:
        return dense.add_rms_norm(x, residual, weight, eps)
    total = residual + x
    return rms_norm(total, weight, eps), total


def frozen_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`rms_norm` with a gradient for x only."""
    return _FrozenRmsNorm.apply(x, weight, eps)


def _normalised(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The result and 1 / rms(x) [..., 1], float32."""
    if dense.is_supported(x, weight):
        return dense.rms_norm_with_inverse(x, weight, eps)
    wide = x.to(torch.float32)
    inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (wide * inverse).to(x.dtype), inverse


class _FrozenRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out, inverse = _normalised(x, weight, eps)
        ctx.save_for_backward(x, weight, inverse)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        x, weight, inverse = ctx.saved_tensors
        if dense.is_supported(x, weight):
            return dense.rms_norm_backward(grads[0], x, weight, inverse), None, None
        weighted = grads[0].to(torch.float32, copy=True).mul_(weight.to(torch.float32))
        wide = x.to(torch.float32)
        mean = torch.linalg.vecdot(weighted, wide).unsqueeze(-1).mul_(inverse * inverse).div_(x.shape[-1])
        by_x = weighted.addcmul_(wide, mean, value=-1).mul_(inverse)
        return by_x.to(x.dtype), None, None
