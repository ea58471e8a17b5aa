"""Matrix products of the twin that must round as serving's do.

`served_product` is for LoRA, of which serving has copies in the model's dtype. `product` is for float32: with fewer
than four rows, BLAS takes other kernels, which add in another order, so that a token would get other numbers when it is
decoded alone than in training, and in bf16 now and then other experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

FEWEST_ROWS = 8


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [..., M, K] times b [..., K, N] in float32; a row of the result does not depend on M."""
    rows = a.shape[-2]
    if rows >= FEWEST_ROWS:
        return torch.matmul(a, b)
    return torch.matmul(functional.pad(a, (0, 0, 0, FEWEST_ROWS - rows)), b)[..., :rows, :]


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return values.to(dtype).to(values.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`values` rounded to what `dtype` can hold, in their own dtype; the gradient is passed on unchanged."""
    return values if dtype == values.dtype else _Rounded.apply(values, dtype)


class _ServedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, master: torch.Tensor, alpha: float, base: torch.Tensor | None
    ) -> torch.Tensor:
        served = master.to(x.dtype)
        ctx.save_for_backward(x, served)
        ctx.alpha, ctx.master_dtype = alpha, master.dtype
        multiply = torch.addmm if x.dim() == 2 else torch.baddbmm
        if base is None:
            return multiply(x.new_empty(1), x, served, beta=0, alpha=alpha)
        return multiply(base, x, served, alpha=alpha)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, served = ctx.saved_tensors
        scaled = grads[0].float() * ctx.alpha
        by_x = (scaled @ served.float().mT).to(x.dtype) if ctx.needs_input_grad[0] else None
        by_master = (x.float().mT @ scaled).to(ctx.master_dtype) if ctx.needs_input_grad[1] else None
        return by_x, by_master, None, grads[0] if ctx.needs_input_grad[3] else None


def served_product(
    x: torch.Tensor, master: torch.Tensor, *, alpha: float = 1.0, base: torch.Tensor | None = None
) -> torch.Tensor:
    """base + alpha * x times master, rounded once to x's dtype: x [M, K], master [K, N], base [M, N] or None.

    All three may have one more dimension in front. `master` is rounded to x's dtype before; gradients pass as if it was
    not (straight-through, Bengio et al. 2013, arXiv:1308.3432), and the master's is a float32 sum in its own dtype.
    """
    return _ServedProduct.apply(x, master, alpha, base)
