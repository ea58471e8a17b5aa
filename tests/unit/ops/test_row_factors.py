"""Rows times factors: bits, gradients, and the table of temperatures."""

from __future__ import annotations

import math

import torch

from kt_runtime.ops.row_factors import scale_rows, temperature_of, temperatures


def test_a_row_is_its_product_in_float32_rounded_once_and_has_no_other_row_in_it() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(7, 3, 40, generator=generator).bfloat16()
    factors = torch.rand(7, 3, generator=generator)
    found = scale_rows(x, factors)
    assert torch.equal(found, (x.double() * factors.double()[..., None]).float().bfloat16())
    assert all(torch.equal(scale_rows(x[row], factors[row]), found[row]) for row in range(7))


def test_gradients_are_autograd_s() -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(5, 40, generator=generator, requires_grad=True)
    factors = torch.rand(5, generator=generator, requires_grad=True)
    weights = torch.randn(5, 40, generator=generator)
    expected = torch.autograd.grad(((x * factors[:, None]) * weights).sum(), [x, factors])
    found = torch.autograd.grad((scale_rows(x, factors) * weights).sum(), [x, factors])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=5e-7)  # 0 measured; a rounding of up to 4


def test_temperatures_grow_by_the_logarithm_of_the_steps_that_a_position_has_completed() -> None:
    places = torch.tensor([0, 6, 7, 14, 15, 99])
    expected = [1 + 0.1 * math.log1p((place + 1) // 8) for place in places.tolist()]
    assert torch.equal(temperature_of(places, 8, 0.1, 100), torch.tensor(expected))
    assert len(temperatures(8, 0.1, 100)) == 13


def test_a_temperature_does_not_depend_on_the_number_of_positions() -> None:
    assert torch.equal(temperatures(8, 0.1, 10_000)[:13], temperatures(8, 0.1, 100))
