"""LoRA beside absorbed `kv_b_proj`, against float64 products with the merged delta B A."""

from __future__ import annotations

import pytest
import torch

from kt_runtime.ops import mla

TOKENS, HEADS, KEY, VALUE, LATENT, RANK = 5, 3, 8, 6, 16, 4
# Two roundings to bf16, 2^-9 each: 0.0023 is the largest error measured; in float32 8e-8.
TOLERANCE = {torch.float32: 5e-7, torch.bfloat16: 0.01}


def drawn(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_both_parts_are_those_of_the_merged_delta(dtype: torch.dtype) -> None:
    a = drawn(RANK, LATENT, dtype=dtype, seed=1)
    b = drawn(HEADS * (KEY + VALUE), RANK, dtype=dtype, seed=2)
    query, latent = drawn(HEADS, TOKENS, KEY, dtype=dtype, seed=3), drawn(HEADS, TOKENS, LATENT, dtype=dtype, seed=4)
    b_k, b_v = mla.halves(b, HEADS, KEY)
    merged = (b.double() @ a.double()).view(HEADS, KEY + VALUE, LATENT)
    into_query, into_output = mla.query_delta(query, a, b_k), mla.output_delta(latent, a, b_v)
    assert into_query.dtype == into_output.dtype == dtype
    assert relative_error(into_query, query.double() @ merged[:, :KEY]) <= TOLERANCE[dtype]
    assert relative_error(into_output, latent.double() @ merged[:, KEY:].mT) <= TOLERANCE[dtype]


def test_halves_are_views_of_each_heads_rows() -> None:
    b = torch.arange(HEADS * (KEY + VALUE), dtype=torch.float32)[:, None]
    b_k, b_v = mla.halves(b, HEADS, KEY)
    assert b_k[1, 0, 0] == KEY + VALUE and b_v[1, 0, 0] == KEY + VALUE + KEY
    assert b_k.data_ptr() == b.data_ptr()
