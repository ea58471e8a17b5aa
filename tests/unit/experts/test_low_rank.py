"""LoRA's products on dense layers against the bits of `dense.linear`, and their gradients' sums against float64."""

from __future__ import annotations

import pytest
import torch
from reference.drawn import drawn
from reference.instruction_sets import instruction_sets

from kt_runtime.errors import InvalidValueError
from kt_runtime.experts import dense

DTYPES = (torch.float32, torch.bfloat16)
pytestmark = pytest.mark.usefixtures("the_best_of_this_machine_afterwards")


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "cols", "inner"), [(1, 24, 200), (7, 1030, 6), (150, 48, 200), (300, 600, 16)])
def test_a_product_is_added_to_the_base_and_rounded_once(
    isa: str, dtype: torch.dtype, rows: int, cols: int, inner: int
) -> None:
    dense.configure(isa, 3)
    x, base = drawn(rows, inner, seed=0, dtype=dtype), drawn(rows, cols, seed=2, dtype=dtype)
    weight = drawn(cols, inner + 3, seed=1, dtype=dtype)[:, :inner]  # a slot of higher rank
    product = dense.linear(x, weight, out_dtype=torch.float32) * (10 / 3)
    assert torch.equal(dense.linear_added(x, weight, 10 / 3, None), product.to(dtype))
    expected = (product + base).to(dtype)
    assert torch.equal(dense.linear_added(x, weight, 10 / 3, base), expected)
    dense.configure(isa, 1)
    whole = torch.full((rows, cols + 9), float("nan"), dtype=dtype)
    place = whole[:, 5 : cols + 5]
    place.copy_(base)
    assert dense.linear_added(x, weight, 10 / 3, place, place) is place
    assert torch.equal(place, expected) and whole[:, :5].isnan().all() and whole[:, cols + 5 :].isnan().all()


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "rank", "cols"), [(1, 4, 7), (63, 1, 129), (300, 8, 260), (700, 33, 128), (0, 3, 5)])
def test_an_inner_product_is_float64s_whatever_the_threads(
    isa: str, dtype: torch.dtype, rows: int, rank: int, cols: int
) -> None:
    """Float32 sums of up to 700 products of numbers of about 1: 9.8e-5 measured."""
    dense.configure(isa, 1)
    a, b = drawn(rows, rank, seed=3, dtype=dtype), drawn(rows, cols + 2, seed=4, dtype=dtype)[:, 2:]
    found = dense.inner_product(a, b, 0.7)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), 0.7 * a.double().T @ b.double(), rtol=0, atol=4e-4)
    dense.configure(isa, 3)
    assert torch.equal(dense.inner_product(a, b, 0.7), found)


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(InvalidValueError, match=r"base has shape \[4, 9\]; expected \[4, 8\]"):
        dense.linear_added(torch.zeros(4, 6), torch.zeros(8, 6), 1.0, torch.zeros(4, 9))
    with pytest.raises(InvalidValueError, match=r"b has shape \[5, 8\]; expected \[4, any\]"):
        dense.inner_product(torch.zeros(4, 6), torch.zeros(5, 8))
