"""SwiGLU against float64, its gradients against autograd, and bits that do not depend on the call."""

from __future__ import annotations

import pytest
import torch
from reference.instruction_sets import instruction_sets
from torch.nn import functional

from kt_runtime.experts import dense
from kt_runtime.ops.activation import silu_and_multiply

# Relative, beside atol for roots. Measured: float32 2e-7; bf16 3.9e-3, a rounding of the result.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8}


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_values_and_gradients_are_float64s(dtype: torch.dtype) -> None:
    gate, up = (drawn(3, 17, 45, seed=seed, dtype=dtype).requires_grad_() for seed in (0, 1))
    by_out = drawn(3, 17, 45, seed=2, dtype=dtype)
    found = silu_and_multiply(gate, up)
    assert found.dtype == dtype
    wide = [x.detach().double().requires_grad_() for x in (gate, up)]
    exact = functional.silu(wide[0]) * wide[1]
    torch.testing.assert_close(found.double(), exact, rtol=TOLERANCE[dtype], atol=1e-6)
    gradients = torch.autograd.grad(found, (gate, up), by_out)
    for gradient, wanted in zip(gradients, torch.autograd.grad(exact, wide, by_out.double()), strict=True):
        assert gradient.dtype == dtype
        torch.testing.assert_close(gradient.double(), wanted, rtol=TOLERANCE[dtype], atol=1e-5)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_row_depends_neither_on_the_batch_nor_on_threads_nor_on_the_instruction_set(dtype: torch.dtype) -> None:
    both = drawn(700, 2 * 133, seed=3, dtype=dtype)  # halves of a fused layer, of no round size
    gate, up = both.chunk(2, dim=-1)
    whole = silu_and_multiply(gate, up)
    try:
        for isa in instruction_sets():
            for threads in (1, 3):
                dense.configure(isa, threads)
                assert torch.equal(silu_and_multiply(gate, up), whole)
    finally:
        dense.configure()
    for rows in (1, 7, 64):
        parts = [silu_and_multiply(*part.chunk(2, dim=-1)) for part in both.split(rows)]
        assert torch.equal(torch.cat(parts), whole)
    assert silu_and_multiply(gate[:0], up[:0]).shape == (0, 133)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_row_s_gradients_depend_neither_on_the_batch_nor_on_threads(dtype: torch.dtype) -> None:
    gate, up = drawn(700, 2 * 133, seed=3, dtype=dtype).chunk(2, dim=-1)
    by_out = drawn(700, 133, seed=6, dtype=dtype)
    try:
        for isa in instruction_sets():
            dense.configure(isa, 3)
            whole = torch.cat(dense.silu_and_multiply_backward(by_out, gate, up), dim=-1)
            for rows in (1, 64):
                parts = zip(by_out[:70].split(rows), gate[:70].split(rows), up[:70].split(rows), strict=True)
                found = [torch.cat(dense.silu_and_multiply_backward(*part), dim=-1) for part in parts]
                assert torch.equal(torch.cat(found), whole[:70])
            dense.configure(isa, 1)
            assert torch.equal(torch.cat(dense.silu_and_multiply_backward(by_out, gate, up), dim=-1), whole)
    finally:
        dense.configure()


def test_nan_stays_in_its_element() -> None:
    gate, up = drawn(4, 40, seed=4), drawn(4, 40, seed=5)
    clean = silu_and_multiply(gate, up)
    gate[1, 7] = float("nan")
    found = silu_and_multiply(gate, up)
    assert found[1, 7].isnan()
    found[1, 7] = clean[1, 7]
    assert torch.equal(found, clean)
