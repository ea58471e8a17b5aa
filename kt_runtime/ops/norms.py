"""RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467) with Hugging Face's roundings, and its gradient.

Forward takes the same steps in the same order as transformers 5's `Qwen3MoeRMSNorm`, `DeepseekV2RMSNorm` and
`DeepseekV3RMSNorm`: statistics in float32, the normalised state rounded to x's dtype before it is multiplied with the
weight. Left to autograd, each step keeps a tensor and comes back as one to three passes over memory. The weight is
frozen, so that the whole gradient is

    d x = r (g w - n mean(g w n)),    r = 1 / sqrt(mean(x^2) + eps),    n = r x

which is computed in float32 from x and r alone.
"""

from __future__ import annotations

from typing import Any

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """weight * x / rms(x): x [..., H], weight [H] -> [..., H] in x's dtype."""
    return _normalised(x, weight, eps)[0]


def frozen_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`rms_norm` with a gradient for x alone."""
    return _FrozenRmsNorm.apply(x, weight, eps)


def _normalised(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The result and 1 / rms(x) [..., 1], float32."""
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
        weighted = grads[0].to(torch.float32, copy=True).mul_(weight.to(torch.float32))
        wide = x.to(torch.float32)
        mean = torch.linalg.vecdot(weighted, wide).unsqueeze(-1).mul_(inverse * inverse).div_(x.shape[-1])
        by_x = weighted.addcmul_(wide, mean, value=-1).mul_(inverse)
        return by_x.to(x.dtype), None, None
