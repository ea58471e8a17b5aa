"""The gated delta rule, its gradients and the gates: against float64, and the bits that serving and training share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from reference import delta_net as reference

from kt_runtime import _experts
from kt_runtime.errors import InvalidValueError
from kt_runtime.experts import dense
from kt_runtime.experts.attention import DeltaHeads, DeltaStates, DeltaWeights, gated_delta
from kt_runtime.ops.delta_net import delta_rule, gated_norm, offset_rms_norm, sigmoid_and_multiply

HEADS = (
    DeltaHeads(1, 1, 8, 8),
    DeltaHeads(2, 4, 32, 24),
    DeltaHeads(1, 3, 19, 37),
    DeltaHeads(2, 2, 128, 128),
)
# Of the largest element.
FORWARD_TOLERANCE = 3e-6  # 8e-7 measured
GRADIENT_TOLERANCE = 5e-6  # 1.6e-6 measured
BF16_TOLERANCE = 2.0**-8  # the bound of one rounding; 2.8e-3 measured, 3.3e-3 of gates
GATE_TOLERANCE = 5e-7  # 1.3e-7 measured


@dataclass(frozen=True)
class Case:
    heads: DeltaHeads
    weights: DeltaWeights
    x: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor

    def expected(self, *inputs: torch.Tensor) -> torch.Tensor:
        """In float64. `inputs`: x, a and b; else the case's own."""
        x, a, b = inputs or (self.x.double(), self.a.double(), self.b.double())
        weights = (part.double() for part in (self.weights.filter, self.weights.log_rate, self.weights.bias))
        return reference.gated_delta(x, a, b, self.heads, *weights)[0]

    def states(self, slots: int) -> DeltaStates:
        """Filled with NaN: nothing may be read of a slot whose sequence begins."""
        heads, taps = self.heads, self.weights.filter.shape[1]
        inputs = torch.full((slots, heads.channels, taps - 1), torch.nan, dtype=self.x.dtype)
        states = torch.full((slots, heads.value_heads, heads.key_size, heads.value_size), torch.nan)
        return DeltaStates(inputs, states)


def case(heads: DeltaHeads, tokens: int, dtype: torch.dtype = torch.float32, taps: int = 4, seed: int = 0) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (scale * torch.randn(*shape, generator=generator)).to(dtype)

    weights = DeltaWeights(
        heads,
        drawn(heads.channels, taps, scale=0.5),
        drawn(heads.value_heads, scale=0.5).float(),
        drawn(heads.value_heads, scale=0.5),
    )
    return Case(heads, weights, drawn(tokens, heads.channels), *(drawn(tokens, heads.value_heads) for _ in range(2)))


def whole(tokens: int, slot: int = 0) -> torch.Tensor:
    return torch.tensor([[0, tokens, slot, 0]])


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    found, expected = found.detach().double(), expected.detach()
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


@pytest.fixture(params=_experts.available_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = dense._native
    dense.configure(request.param)
    yield request.param
    dense._native = before


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 70])
def test_it_equals_the_recurrence_in_float64(isa: str, heads: DeltaHeads, tokens: int) -> None:
    one = case(heads, tokens)
    found = gated_delta(one.x, one.a, one.b, one.weights, whole(tokens))
    assert error(found, one.expected()) <= FORWARD_TOLERANCE


def test_in_bfloat16_it_rounds_the_result_once(isa: str) -> None:
    one = case(HEADS[1], 70, torch.bfloat16)
    found = gated_delta(one.x, one.a, one.b, one.weights, whole(70))
    assert found.dtype == torch.bfloat16
    assert error(found, one.expected()) <= BF16_TOLERANCE


def test_instruction_sets_give_the_same_bits() -> None:
    one, before = case(HEADS[2], 40), dense._native
    found = []
    for isa in _experts.available_isas():
        dense.configure(isa)
        found.append(gated_delta(one.x, one.a, one.b, one.weights, whole(40)))
    dense._native = before
    assert all(torch.equal(other, found[0]) for other in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cut", [1, 2, 7, 32, 33, 64])
def test_the_cut_of_a_sequence_changes_no_bit(cut: int, dtype: torch.dtype) -> None:
    one = case(HEADS[1], 70, dtype, taps=5)
    at_once = one.states(3)
    expected = gated_delta(one.x, one.a, one.b, one.weights, whole(70, slot=2), at_once)
    kept, found = one.states(3), []
    for first in range(0, 70, cut):
        part = slice(first, min(first + cut, 70))
        rows = torch.tensor([[0, part.stop - first, 2, int(first > 0)]])
        found.append(gated_delta(one.x[part], one.a[part], one.b[part], one.weights, rows, kept))
    assert torch.equal(torch.cat(found), expected)
    assert torch.equal(kept.inputs[2], at_once.inputs[2]) and torch.equal(kept.states[2], at_once.states[2])
    assert torch.isnan(kept.states[:2]).all() and torch.isnan(kept.inputs[:2]).all()
    assert torch.equal(expected, gated_delta(one.x, one.a, one.b, one.weights, whole(70)))


def test_other_sequences_of_a_call_change_no_bit() -> None:
    one = case(HEADS[1], 50)
    kept = one.states(4)
    rows = torch.tensor([[0, 20, 3, 0], [20, 1, 0, 0], [25, 25, 1, 0]])
    found = gated_delta(one.x, one.a, one.b, one.weights, rows, kept)
    for first, count, slot, _ in rows.tolist():
        part, alone = slice(first, first + count), one.states(4)
        expected = gated_delta(one.x[part], one.a[part], one.b[part], one.weights, whole(count, slot), alone)
        assert torch.equal(found[part], expected)
        assert torch.equal(kept.states[slot], alone.states[slot])
    assert not found[21:25].any()


def test_a_token_that_is_not_finite_reaches_its_own_sequence_alone() -> None:
    one = case(HEADS[1], 40)
    rows = torch.tensor([[0, 20, 0, 0], [20, 20, 1, 0]])
    expected = gated_delta(one.x, one.a, one.b, one.weights, rows)
    one.x[5] = torch.nan
    found = gated_delta(one.x, one.a, one.b, one.weights, rows)
    assert torch.equal(found[:5], expected[:5]) and torch.equal(found[20:], expected[20:])
    assert torch.isnan(found[5:20]).all()


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 50])
def test_the_gradients_equal_autograd_s_in_float64(isa: str, heads: DeltaHeads, tokens: int) -> None:
    one = case(heads, tokens)
    by_out = torch.randn(tokens, heads.value_heads * heads.value_size, generator=torch.Generator().manual_seed(1))
    wide = [part.double().requires_grad_() for part in (one.x, one.a, one.b)]
    expected = torch.autograd.grad(one.expected(*wide), wide, by_out.double())
    x, a, b = inputs = [part.clone().requires_grad_() for part in (one.x, one.a, one.b)]
    found = torch.autograd.grad(delta_rule(x, a, b, one.weights, whole(tokens)), inputs, by_out)
    for ours, theirs in zip(found, expected, strict=True):
        assert error(ours, theirs) <= GRADIENT_TOLERANCE


def test_gradients_in_bfloat16_are_rounded_once() -> None:
    one = case(HEADS[1], 50, torch.bfloat16)
    wide = [part.double().requires_grad_() for part in (one.x, one.a, one.b)]
    out = one.expected(*wide)
    by_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = torch.autograd.grad(out, wide, by_out.double())
    x, a, b = inputs = [part.clone().requires_grad_() for part in (one.x, one.a, one.b)]
    found = torch.autograd.grad(delta_rule(x, a, b, one.weights, whole(50)), inputs, by_out)
    for ours, theirs in zip(found, expected, strict=True):
        assert error(ours, theirs) <= BF16_TOLERANCE


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[0, 9, 0, 0]], "9 tokens from row 0"),
        ([[0, 4, 0, 0], [3, 2, 1, 0]], "allowed: rows 4"),
        ([[0, 4, 5, 0]], "slot 5; allowed: 0 to 1"),
        ([[0, 4, 1, 0], [4, 4, 1, 0]], "slot 1 is of two sequences"),
    ],
)
def test_sequences_that_do_not_fit_are_refused_with_their_numbers(rows: list[list[int]], message: str) -> None:
    one = case(HEADS[0], 8)
    kept = one.states(2)
    with pytest.raises(InvalidValueError, match=message):
        gated_delta(one.x, one.a, one.b, one.weights, torch.tensor(rows), kept)
    assert torch.isnan(kept.states).all()


def test_a_sequence_can_t_continue_without_states() -> None:
    one = case(HEADS[0], 8)
    with pytest.raises(InvalidValueError, match="there are no states"):
        gated_delta(one.x, one.a, one.b, one.weights, torch.tensor([[0, 8, 0, 1]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("gates", "columns"), [(1, 700), (700, 700), (7, 700)])
def test_sigmoid_gates_and_their_gradients(isa: str, dtype: torch.dtype, gates: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(2)
    gate, x, by_out = (torch.randn(9, n, generator=generator).to(dtype) for n in (gates, columns, columns))
    inputs = [gate.requires_grad_(), x.requires_grad_()]
    out = sigmoid_and_multiply(*inputs)
    wide = [part.detach().double().requires_grad_() for part in inputs]
    expected = (wide[1].unflatten(-1, (gates, -1)) * wide[0].sigmoid().unsqueeze(-1)).flatten(-2)
    tolerance = GATE_TOLERANCE if dtype == torch.float32 else BF16_TOLERANCE
    assert error(out, expected) <= tolerance
    pairs = zip(
        torch.autograd.grad(out, inputs, by_out), torch.autograd.grad(expected, wide, by_out.double()), strict=True
    )
    assert all(error(ours, theirs) <= tolerance for ours, theirs in pairs)


def test_norms_whose_weight_is_an_offset_from_one_and_gated_norms() -> None:
    generator = torch.Generator().manual_seed(3)
    x, z, by_out = (torch.randn(5, 48, generator=generator) for _ in range(3))
    weight = 0.1 * torch.randn(48, generator=generator)
    for ours, gated in ((offset_rms_norm(x.requires_grad_(), weight, 1e-6), False), (None, True)):
        wide, wide_z = x.detach().double().requires_grad_(), z.double().requires_grad_()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        expected = (
            normed * weight.double() * torch.nn.functional.silu(wide_z) if gated else normed * (1 + weight.double())
        )
        found = gated_norm(x, z, weight, 1e-6) if ours is None else ours
        assert error(found, expected) <= 1e-6  # 1.3e-7 measured
        assert (
            error(torch.autograd.grad(found, x, by_out)[0], torch.autograd.grad(expected, wide, by_out.double())[0])
            <= 8e-7  # 9.8e-8 measured
        )
