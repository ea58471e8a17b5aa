"""Rotary embedding: Hugging Face's bits forward, autograd's gradient backward, the same on every instruction set."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from reference.instruction_sets import instruction_sets
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave
from transformers.models.qwen3_moe.modeling_qwen3_moe import apply_rotary_pos_emb

from kt_runtime.errors import InvalidValueError
from kt_runtime.experts import dense
from kt_runtime.ops.rotary import Rotary

SEQUENCES, TOKENS, HEADS, ROTATED, SIZE = 2, 33, 5, 24, 40


@pytest.fixture(params=instruction_sets())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    dense.configure(request.param, 3)
    yield request.param
    dense.configure()


def rotary_of(dtype: torch.dtype, interleaved: bool) -> Rotary:
    generator = torch.Generator().manual_seed(0)
    phases = 6.3 * torch.rand(100, ROTATED // 2, generator=generator)
    places = torch.randint(0, 100, (SEQUENCES, TOKENS), generator=generator)
    return Rotary(torch.cat([phases.cos(), phases.sin()], dim=-1).to(dtype), places, interleaved)


def heads(dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    """[B, S, N, D], a part of the columns of a wider tensor, as in latent attention."""
    wide = torch.randn(SEQUENCES, TOKENS, HEADS, SIZE + 8, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return wide[..., 8:]


def by_hugging_face(x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Its result for the rotated elements. Interleaved, it moves the first elements of all pairs to the front."""
    cos, sin = (torch.cat([half, half], -1) for half in rotary.angles[rotary.places].chunk(2, dim=-1))
    apply = apply_rotary_pos_emb_interleave if rotary.interleaved else apply_rotary_pos_emb
    part = x[..., :ROTATED].transpose(1, 2)
    rotated: torch.Tensor = apply(part, part, cos, sin)[0].transpose(1, 2)
    return rotated.unflatten(-1, (2, -1)).mT.flatten(-2) if rotary.interleaved else rotated


@pytest.mark.parametrize("dtype", dense.DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_values_and_gradients_have_the_bits_of_hugging_face(isa: str, dtype: torch.dtype, interleaved: bool) -> None:
    rotary, x = rotary_of(dtype, interleaved), heads(dtype).requires_grad_()
    found, expected = rotary(x), by_hugging_face(x, rotary)
    assert torch.equal(found[..., :ROTATED], expected) and torch.equal(found[..., ROTATED:], x[..., ROTATED:])
    by_out = heads(dtype, seed=2)
    (gradient,) = torch.autograd.grad(found, x, by_out)
    (wanted,) = torch.autograd.grad(expected, x, by_out[..., :ROTATED])
    assert torch.equal(gradient[..., :ROTATED], wanted[..., :ROTATED])
    assert torch.equal(gradient[..., ROTATED:], by_out[..., ROTATED:])


@pytest.mark.parametrize("dtype", dense.DTYPES)
def test_the_inverse_undoes_it(dtype: torch.dtype) -> None:
    """To the rounding of two products and two sums: 1.2e-7 and 8e-3 of the largest element were measured."""
    rotary, x = rotary_of(dtype, True), heads(dtype)[0]
    back = dense.rotate(
        dense.rotate(x, rotary.angles, rotary.places[0], True), rotary.angles, rotary.places[0], True, inverse=True
    )
    allowed = (2.0**-21 if dtype == torch.float32 else 2.0**-6) * float(x.abs().max())
    assert (back.double() - x.double()).abs().max() <= allowed


@pytest.mark.parametrize("dtype", dense.DTYPES)
def test_a_token_depends_neither_on_the_call_nor_on_threads(isa: str, dtype: torch.dtype) -> None:
    rotary = rotary_of(dtype, False)
    x, places = heads(dtype).flatten(0, 1).repeat(30, 1, 1), rotary.places.flatten().repeat(30)
    whole = dense.rotate(x, rotary.angles, places, False)
    for tokens in (1, 7):
        parts = zip(x[:70].split(tokens), places[:70].split(tokens), strict=True)
        found = torch.cat([dense.rotate(part, rotary.angles, at, False) for part, at in parts])
        assert torch.equal(found, whole[:70])
    dense.configure(isa, 1)
    assert torch.equal(dense.rotate(x, rotary.angles, places, False), whole)
    assert dense.rotate(x[:0], rotary.angles, places[:0], False).shape == (0, HEADS, SIZE)


WRONG = {
    "position": ([0, 100], ROTATED, r"positions\[1\] is 100; allowed: 0 to 99"),
    "negative position": ([-1, 0], ROTATED, r"positions\[0\] is -1; allowed: 0 to 99"),
    "columns": ([0, 1], SIZE + 2, r"angles has 42 columns; allowed: an even number, at most the size of a head, 40"),
    "odd columns": ([0, 1], 3, "angles has 3 columns; allowed: an even number"),
    "tokens": ([0, 1, 2], ROTATED, r"positions has shape \[3\]; expected \[2\]"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_named(name: str) -> None:
    places, rotated, message = WRONG[name]
    with pytest.raises(InvalidValueError, match=message):
        dense.rotate(torch.zeros(2, HEADS, SIZE), torch.zeros(100, rotated), torch.tensor(places), False)
