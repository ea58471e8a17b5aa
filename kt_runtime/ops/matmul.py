"""Matrix products whose rounding in training must equal serving's.

`frozen_linear` is a linear layer of the base. On a CPU kt-runtime's kernels compute it (`kt_runtime.experts.dense`), in
serving too; a token's result does not depend on the other tokens of a call. `served_product` is for LoRA: serving
holds copies of A and B in the model's dtype. `product` is for float32. With fewer than four rows, BLAS uses other
kernels, which sum in another order. A token decoded alone would then get other numbers than in training, and in bf16
sometimes other experts.

Gradients have no counterpart in serving. On a CPU without bf16 instructions, PyTorch multiplies untransposed bf16
matrices one element at a time (0.9 GFLOP/s, against 150 in float32). There, `gradient_product` multiplies in float32
and rounds once; the backward passes of `frozen_linear` and `frozen_bmm` use it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.nn import functional

from kt_runtime.experts import dense

FEWEST_ROWS = 8
WIDENED_ROWS = 1 << 14  # rows of a bf16 matrix converted to float32 at a time: 256 MiB with a hidden size of 4096


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [..., M, K] @ b [..., K, N] in float32; a row of the result does not depend on M."""
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
    """`values` rounded to the precision of `dtype`, in their own dtype; the gradient passes unchanged."""
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
        by_x = _scaled_product(grads[0], served.mT, ctx.alpha) if ctx.needs_input_grad[0] else None
        by_master = None
        if ctx.needs_input_grad[1]:
            by_master = _inner_product(x.float(), grads[0].float()).mul_(ctx.alpha).to(ctx.master_dtype)
        return by_x, by_master, None, grads[0] if ctx.needs_input_grad[3] else None


def _scaled_product(a: torch.Tensor, b: torch.Tensor, alpha: float) -> torch.Tensor:
    """alpha * a @ b, rounded once to their dtype: a [..., M, K], b [..., K, N]. For gradients only."""
    if _in_software(a):
        return (a.float() @ b.float()).mul_(alpha).to(a.dtype)
    multiply = torch.addmm if a.dim() == 2 else torch.baddbmm
    return multiply(a.new_empty(1), a, b, beta=0, alpha=alpha)


def _inner_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a^T b: a [..., M, K], b [..., M, N] -> [..., K, N]. BLAS is several times faster with the thin matrix first."""
    return a.mT @ b if a.shape[-1] <= b.shape[-1] else (b.mT @ a).mT


def served_product(
    x: torch.Tensor, master: torch.Tensor, *, alpha: float = 1.0, base: torch.Tensor | None = None
) -> torch.Tensor:
    """base + alpha * x @ master, rounded once to x's dtype: x [M, K], master [K, N], base [M, N] or None.

    All three may have a leading batch dimension. `master` is first rounded to x's dtype; gradients ignore that rounding
    (straight-through, Bengio et al. 2013, arXiv:1308.3432). The master's gradient is summed in float32 and has the
    master's dtype.
    """
    return _ServedProduct.apply(x, master, alpha, base)


@cache
def _cpu_multiplies_bf16() -> bool:
    """Whether PyTorch computes products of bf16 matrices on this CPU with oneDNN."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _in_software(values: torch.Tensor) -> bool:
    """Whether float32 is faster for products of matrices like `values`: bf16 on a CPU without bf16 instructions."""
    return values.dtype == torch.bfloat16 and values.device.type == "cpu" and not _cpu_multiplies_bf16()


def gradient_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [..., M, K] @ b [..., K, N], in their dtype; computed in float32 where that is faster. For gradients only.

    A matrix b with more than `WIDENED_ROWS` rows, such as lm_head's, is converted to float32 piece by piece.
    """
    if not _in_software(a):
        return a @ b
    if b.dim() != 2 or len(b) <= WIDENED_ROWS:
        return (a.float() @ b.float()).to(a.dtype)
    rows = a.flatten(0, -2)
    total = torch.zeros(len(rows), b.shape[1])
    for start in range(0, len(b), WIDENED_ROWS):
        piece = slice(start, start + WIDENED_ROWS)
        total.addmm_(rows[:, piece].float(), b[piece].float())
    return total.view(*a.shape[:-1], -1).to(a.dtype)


class _FrozenLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return dense.linear(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return gradient_product(grads[0], weight), None, None


class _FrozenBmm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return torch.bmm(x, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (weight,) = ctx.saved_tensors
        return gradient_product(grads[0], weight.mT), None


def frozen_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`torch.nn.functional.linear` with a gradient for x only: x [..., K], weight [N, K] -> [..., N].

    PyTorch computes it on a GPU, for mixed dtypes, and for dtypes other than float32 and bfloat16.
    """
    if not dense.is_supported(x, weight):
        return functional.linear(x, weight, bias)
    return _FrozenLinear.apply(x, weight, bias)


def frozen_bmm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`torch.bmm` with a gradient for x only."""
    return _FrozenBmm.apply(x, weight) if _in_software(x) else torch.bmm(x, weight)
