from __future__ import annotations

import pytest
import torch

from kt_runtime.ops import matmul
from kt_runtime.ops.matmul import (
    frozen_heads,
    frozen_linear,
    gradient_product,
    lora_product,
    product,
    rounded,
    served_product,
)
from kt_runtime.resident.twin.frozen import FrozenLinear


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8])
def test_a_row_does_not_depend_on_how_many_there_are(rows: int) -> None:
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(96, 64, generator=g), torch.randn(64, 57, generator=g)
    assert torch.equal(product(a[:rows], b), product(a, b)[:rows])
    base, low = torch.randn(3, 96, 57, generator=g).bfloat16(), torch.randn(3, 96, 64, generator=g).bfloat16()
    weight = torch.randn(3, 57, 64, generator=g).bfloat16().mT
    whole = lora_product(low, weight, 10 / 3, base)
    assert torch.equal(lora_product(low[:, :rows], weight, 10 / 3, base[:, :rows]), whole[:, :rows])
    alone = lora_product(low[1, :rows], weight[1].contiguous(), 10 / 3, base[1, :rows])
    assert torch.equal(alone, whole[1, :rows])


def test_rounded_values_stay_in_their_dtype_and_pass_the_gradient_on() -> None:
    x = torch.randn(9, requires_grad=True)
    found = rounded(x, torch.bfloat16)
    assert torch.equal(found, x.to(torch.bfloat16).float())
    assert torch.equal(torch.autograd.grad(found, x, torch.arange(9.0))[0], torch.arange(9.0))
    assert rounded(x, torch.float32) is x


@pytest.mark.parametrize("shape", [(), (3,)])
@pytest.mark.parametrize("with_base", [False, True])
def test_served_product_in_float32_is_the_plain_one(shape: tuple[int, ...], with_base: bool) -> None:
    g = torch.Generator().manual_seed(0)
    x, w, base = (torch.randn(*shape, *size, generator=g).requires_grad_() for size in ((7, 5), (5, 4), (7, 4)))
    grad, inputs = torch.randn(*shape, 7, 4, generator=g), (x, w, base)
    found = served_product(x, w, alpha=0.7, base=base if with_base else None)
    expected = 0.7 * x @ w + (base if with_base else 0)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=3e-6)  # 9.5e-7 measured
    ours = torch.autograd.grad(found, inputs, grad, allow_unused=True)
    theirs = torch.autograd.grad(expected, inputs, grad, allow_unused=True)
    for gradient, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-6, atol=1e-6)  # 9.5e-7 measured, of 6


# float32: sums in another order, 9.5e-6 measured. bf16: a unit in the last place where that crosses a tie.
ONE_ROUNDING = {torch.float32: (0.0, 3e-5), torch.bfloat16: (2**-7, 0.0)}  # relative, absolute


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_frozen_matrix_gives_the_exact_product_and_the_exact_gradient_rounded(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(2)
    x, weight = (torch.randn(*shape, generator=g).to(dtype) for shape in ((3, 20, 32), (48, 32)))
    by_out = torch.randn(3, 20, 48, generator=g).to(dtype)
    leaf = x.clone().requires_grad_()
    out = frozen_linear(leaf, weight)
    product = x.double() @ weight.double().T
    # bf16: one rounding. Sums in float32: 2.5e-6 measured.
    torch.testing.assert_close(out.double(), product, rtol=2**-8 if dtype == torch.bfloat16 else 0, atol=1.2e-5)
    assert torch.equal(out[1:2, 7:8], frozen_linear(x[1:2, 7:8], weight))
    exact = (by_out.double() @ weight.double()).to(dtype)
    rtol, atol = ONE_ROUNDING[dtype]
    torch.testing.assert_close(torch.autograd.grad(out, leaf, by_out)[0], exact, rtol=rtol, atol=atol)
    leaf = x.clone().requires_grad_()  # three tokens with twenty heads
    stacked = torch.randn(20, 48, 32, generator=g).to(dtype)
    out = frozen_heads(leaf, stacked)
    assert torch.equal(out[:, 7], frozen_linear(x[:, 7], stacked[7]))
    exact = torch.einsum("tno,nok->tnk", by_out.double(), stacked.double()).to(dtype)
    torch.testing.assert_close(torch.autograd.grad(out, leaf, by_out)[0], exact, rtol=rtol, atol=atol)


def test_a_bias_is_added_and_a_frozen_layer_is_a_linear_layer() -> None:
    layer = torch.nn.Linear(8, 6, dtype=torch.bfloat16)
    x = torch.randn(5, 8, dtype=torch.bfloat16, requires_grad=True)
    plain = layer(x)
    layer.__class__ = FrozenLinear
    assert isinstance(layer, torch.nn.Linear)
    assert torch.equal(layer(x), plain)


@pytest.mark.parametrize("in_software", [False, True])
def test_gradients_of_a_matrix_and_of_heads_are_exact_products_rounded(
    monkeypatch: pytest.MonkeyPatch, in_software: bool
) -> None:
    g = torch.Generator().manual_seed(3)
    a, b = (torch.randn(*shape, generator=g).bfloat16() for shape in ((2, 5, 300), (300, 24)))
    monkeypatch.setattr(matmul, "_in_software", lambda values: in_software)
    for right in (b, b.expand(2, -1, -1)):
        found = gradient_product(a, right)
        assert found.dtype == torch.bfloat16 and found.shape == (2, 5, 24)
        # Rounded once, 2^-8 at most. Sums of 300 products in float32: 1.6e-5 measured.
        torch.testing.assert_close(found.double(), a.double() @ b.double(), rtol=2**-8, atol=1e-4)
