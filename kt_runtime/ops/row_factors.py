"""Rows times a factor each: queries times a temperature, inputs of experts times a routing weight (Llama 4).

Products are float32 and rounded once to the rows' dtype, as in the native step (csrc/step/work.h, `scale_row`), so that
serving and training get the same bits.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch


def scale_rows(x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """x [..., H], factors [...] float32 -> [..., H] in x's dtype. Both have gradients."""
    return _Scaled.apply(x, factors)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, factors)
        return _scaled(x, factors)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        x, factors = ctx.saved_tensors
        by_factors = torch.linalg.vecdot(grads[0].float(), x.float()) if ctx.needs_input_grad[1] else None
        return _scaled(grads[0], factors), by_factors


def _scaled(x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    return (x.float() * factors.unsqueeze(-1)).to(x.dtype)


@cache
def temperatures(every: int, strength: float, positions: int) -> torch.Tensor:
    """float32 [positions / every + 1]: what multiplies the queries at positions [i * every - 1, (i + 1) * every - 1),
    1 + strength * ln(1 + i) (arXiv:2501.19399), from float64. The result must not be changed."""
    steps = range(positions // every + 1)
    return torch.tensor([1 + strength * math.log1p(step) for step in steps], dtype=torch.float32, device="cpu")


def temperature_of(places: torch.Tensor, every: int, strength: float, positions: int) -> torch.Tensor:
    """float32, in the shape of the positions `places`, which are below `positions`."""
    table = temperatures(every, strength, positions).to(places.device)
    return table[(places + 1) // every]
