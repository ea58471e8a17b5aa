"""Matrix products whose bits in training must be serving's.

On a CPU kt-runtime's kernels compute them (`kt_runtime.experts.dense`): a token's result does not depend on the other
tokens of a call. BLAS sums in an order that depends on the number of tokens. A token decoded alone would then get other
numbers than in training, and in bf16 sometimes other experts.

`frozen_linear` is a linear layer of the base, `frozen_heads` one for each head. `lora_product` is for LoRA in serving,
which holds copies of A and B in the model's dtype; `served_product` is the same with gradients for float32 masters.
`product` is for float32.

Gradients have no counterpart in serving (`gradient_product`). On a CPU without bf16 instructions, PyTorch multiplies
untransposed bf16 matrices one element at a time (0.9 GFLOP/s, against 150 in float32): there the small products of LoRA
and of single heads are computed in float32.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.nn import functional

from kt_runtime import device
from kt_runtime.experts import dense
from kt_runtime.experts.collected import CollectedGradients, Place, place_of


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [M, K] @ b [K, N] in float32, with a gradient for a only; on a CPU a row of the result does not depend on M."""
    return frozen_linear(a, dense.with_adjacent_columns(b.T))


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
        ctx: Any,
        x: torch.Tensor,
        master: torch.Tensor,
        alpha: float,
        base: torch.Tensor | None,
        place: Place | None,
    ) -> torch.Tensor:
        served = master.to(x.dtype)
        ctx.save_for_backward(x, served)
        ctx.alpha, ctx.master_dtype, ctx.place = alpha, master.dtype, place
        return lora_product(x, served, alpha, base)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, served = ctx.saved_tensors
        by_x = lora_product(grads[0], served.mT, ctx.alpha) if ctx.needs_input_grad[0] else None
        by_master = None
        if ctx.place is not None:
            ctx.place.collected.keep(ctx.place, x, grads[0], ctx.alpha)
        elif ctx.needs_input_grad[1]:
            by_master = _inner_product(x, grads[0], ctx.alpha).to(ctx.master_dtype)
        return by_x, by_master, None, grads[0] if ctx.needs_input_grad[3] else None, None


def _inner_product(a: torch.Tensor, b: torch.Tensor, alpha: float) -> torch.Tensor:
    """alpha * a^T b in float32: a [..., M, K], b [..., M, N] -> [..., K, N]. The thin matrix comes first."""
    if a.shape[-1] > b.shape[-1]:
        return _inner_product(b, a, alpha).mT
    if a.dim() == 2 and dense.is_supported(a, b):
        return dense.inner_product(a, b, alpha)
    return (a.float().mT @ b.float()).mul_(alpha)


def lora_product(
    x: torch.Tensor, weight: torch.Tensor, alpha: float = 1.0, base: torch.Tensor | None = None
) -> torch.Tensor:
    """base + alpha * x @ weight: x [M, K], weight [K, N], base [M, N] or None, of one dtype -> [M, N].

    All three may have a leading batch dimension. On a CPU the product, the one with alpha and the sum with base are
    float32, each rounded; the result is rounded to the dtype once.
    """
    rows = dense.with_adjacent_columns(weight.mT)
    if not dense.is_supported(x, rows):
        return _torch_product(x, weight, alpha, base)
    if x.dim() == 2:
        return dense.linear_added(x, rows, alpha, base)
    tokens = x.transpose(0, 1)
    if alpha == 1 and base is None:
        return dense.linear_heads(tokens, rows).transpose(0, 1)
    total = dense.linear_heads(tokens, rows, out_dtype=torch.float32).transpose(0, 1).mul_(alpha)
    return (total if base is None else total.add_(base)).to(x.dtype)


def lora_product_into(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, alpha: float = 1.0, base: torch.Tensor | None = None
) -> None:
    """`lora_product` without a batch dimension, written to `out` [M, N], which may be `base`."""
    rows = dense.with_adjacent_columns(weight.mT)
    if dense.is_supported(x, rows):
        dense.linear_added(x, rows, alpha, base, out)
    else:
        out.copy_(_torch_product(x, weight, alpha, base))


def _torch_product(x: torch.Tensor, weight: torch.Tensor, alpha: float, base: torch.Tensor | None) -> torch.Tensor:
    multiply = torch.addmm if x.dim() == 2 else torch.baddbmm
    if base is None:
        return multiply(x.new_empty(1), x, weight, beta=0, alpha=alpha)
    return multiply(base, x, weight, alpha=alpha)


def served_product(
    x: torch.Tensor, master: torch.Tensor, *, alpha: float = 1.0, base: torch.Tensor | None = None
) -> torch.Tensor:
    """`lora_product` of x and `master`, with gradients.

    `master` is first rounded to x's dtype; gradients ignore that rounding (straight-through, Bengio et al. 2013,
    arXiv:1308.3432). The master's gradient is summed in float32 and has the master's dtype.
    """
    return _ServedProduct.apply(x, master, alpha, base, place_of(master))


def master_gradient(x: torch.Tensor, by_out: torch.Tensor, alpha: float = 1.0) -> torch.Tensor:
    """The gradient [K, N] of `served_product`'s master, float32: x [M, K], by_out [M, N]."""
    return _inner_product(x, by_out, alpha)


def collected_gradients() -> CollectedGradients:
    """Collects the gradients of masters over parts of a module's tokens, with the bits of `served_product`'s."""
    return CollectedGradients(_inner_product)


@cache
def _cpu_multiplies_bf16() -> bool:
    """Whether PyTorch computes products of bf16 matrices on this CPU with oneDNN."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _in_software(values: torch.Tensor) -> bool:
    """Whether float32 is faster for products of matrices like `values`: bf16 on a CPU without bf16 instructions."""
    return values.dtype == torch.bfloat16 and device.is_host(values) and not _cpu_multiplies_bf16()


def gradient_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [..., M, K] @ b [..., K, N], in their dtype, with float32 sums. For gradients only.

    On a CPU a float32 or bfloat16 matrix b [K, N] is read as it lies: nothing is converted or transposed.
    """
    if b.dim() == 2 and dense.is_supported(a, b):
        return dense.linear_backward(a, b)
    if _in_software(a):
        return (a.float() @ b.float()).to(a.dtype)
    return a @ b


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


class _FrozenHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return dense.linear_heads(x, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (weight,) = ctx.saved_tensors
        return dense.linear_heads_backward(grads[0], weight), None


def frozen_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`torch.nn.functional.linear` with a gradient for x only: x [..., K], weight [N, K] -> [..., N].

    PyTorch computes it on a GPU, for mixed dtypes, and for dtypes other than float32 and bfloat16.
    """
    if not dense.is_supported(x, weight):
        return functional.linear(x, weight, bias)
    return _FrozenLinear.apply(x, weight, bias)


def frozen_heads(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A linear layer of its own for each head, with a gradient for x only: x [T, N, K], weight [N, O, K] -> [T, N, O].

    PyTorch computes it on a GPU, for mixed dtypes, and for dtypes other than float32 and bfloat16.
    """
    if not dense.is_supported(x, weight):
        return torch.bmm(x.transpose(0, 1), weight.mT).transpose(0, 1)
    return _FrozenHeads.apply(x, weight)
