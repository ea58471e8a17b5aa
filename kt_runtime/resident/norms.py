"""RMSNorm of the twin (Zhang & Sennrich 2019, arXiv:1910.07467): Hugging Face's arithmetic, a backward of its own.

Forward takes the same steps in the same order as transformers 5's `Qwen3MoeRMSNorm`, `DeepseekV2RMSNorm` and
`DeepseekV3RMSNorm`, so that it rounds as they and serving do. Left to autograd, each step keeps a tensor and comes back
as one to three passes over memory; the weight is frozen, so that the whole gradient is

    d x = r (g w - n mean(g w n)),    r = 1 / sqrt(mean(x^2) + eps),    n = r x

which is computed in float32 from x and r alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class _FrozenRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.to(torch.float32)
        inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, inverse)
        return weight * (wide * inverse).to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        x, weight, inverse = ctx.saved_tensors
        weighted = grads[0].to(torch.float32, copy=True).mul_(weight.to(torch.float32))
        wide = x.to(torch.float32)
        mean = torch.linalg.vecdot(weighted, wide).unsqueeze(-1).mul_(inverse * inverse).div_(x.shape[-1])
        by_x = weighted.addcmul_(wide, mean, value=-1).mul_(inverse)
        return by_x.to(x.dtype), None, None


class FrozenRmsNorm(nn.Module):
    """Takes the class of a Hugging Face module in place: `weight` and `variance_epsilon` stay as they are."""

    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return _FrozenRmsNorm.apply(hidden_states, self.weight, self.variance_epsilon)


def is_rms_norm(module: nn.Module) -> bool:
    """Whether it is one of the families' RMSNorms, of those whose arithmetic this module has."""
    return type(module).__name__ in ("Qwen3MoeRMSNorm", "DeepseekV2RMSNorm", "DeepseekV3RMSNorm")
