"""LoRA beside absorbed `kv_b_proj`, against float64 products with the merged delta B A."""

from __future__ import annotations

import pytest
import torch
from reference.drawn import drawn

from kt_runtime.ops import mla

TOKENS, HEADS, KEY, VALUE, LATENT, RANK, SCALING = 5, 3, 8, 6, 16, 4, 10 / 3
# Two roundings to bf16, 2^-9 each: 0.0027 is the largest error measured; in float32 1.4e-7.
TOLERANCE = {torch.float32: 5e-7, torch.bfloat16: 0.01}


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_both_parts_are_those_of_the_merged_delta(dtype: torch.dtype) -> None:
    a = drawn(RANK, LATENT, dtype=dtype, seed=1)
    b = drawn(HEADS * (KEY + VALUE), RANK, dtype=dtype, seed=2)
    query, latent = drawn(TOKENS, HEADS, KEY, dtype=dtype, seed=3), drawn(TOKENS, HEADS, LATENT, dtype=dtype, seed=4)
    absorbed, out = drawn(TOKENS, HEADS, LATENT, dtype=dtype, seed=5), drawn(TOKENS, HEADS, VALUE, dtype=dtype, seed=6)
    b_k, b_v = mla.halves(b, HEADS, KEY)
    merged = SCALING * (b.double() @ a.double()).view(HEADS, KEY + VALUE, LATENT)
    into_query = mla.query_with(absorbed, mla.low_query(query, b_k), a, SCALING)
    into_output = mla.output_with(out, mla.low_output(latent, a), b_v, SCALING)
    assert into_query.dtype == into_output.dtype == dtype
    expected = absorbed.double() + torch.einsum("tnk,nkd->tnd", query.double(), merged[:, :KEY])
    assert relative_error(into_query, expected) <= TOLERANCE[dtype]
    expected = out.double() + torch.einsum("tnd,nvd->tnv", latent.double(), merged[:, KEY:])
    assert relative_error(into_output, expected) <= TOLERANCE[dtype]
    first = mla.query_with(absorbed[:1], mla.low_query(query[:1], b_k), a, SCALING)
    assert torch.equal(first, into_query[:1])
    assert torch.equal(mla.output_with(out[:1], mla.low_output(latent[:1], a), b_v, SCALING), into_output[:1])


def test_halves_are_views_of_each_heads_rows() -> None:
    b = torch.arange(HEADS * (KEY + VALUE), dtype=torch.float32)[:, None]
    b_k, b_v = mla.halves(b, HEADS, KEY)
    assert b_k[1, 0, 0] == KEY + VALUE and b_v[1, 0, 0] == KEY + VALUE + KEY
    assert b_k.data_ptr() == b.data_ptr()
