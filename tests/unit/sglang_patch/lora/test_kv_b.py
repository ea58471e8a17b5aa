"""The correction of absorbed attention against `kv_b_proj` with merged weights, in float32."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kt_runtime.sglang_patch.lora.kv_b import apply_q_correction, apply_v_correction

HEADS, NOPE, VALUE, LATENT, MAX_RANK = 3, 8, 6, 16, 8
RANKS = [0, 4, 8]  # of the pool's slots; slot 0 is the base
SCALINGS = [0.0, 1.5, 0.25]
BATCH = [(1, 5), (0, 2), (2, 1), (1, 3)]  # (slot, tokens)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def attention() -> SimpleNamespace:
    """What the correction reads of SGLang's attention layer and batch. Unused parts of the pool hold NaN."""
    generator = torch.Generator().manual_seed(0)
    a = torch.full((3, MAX_RANK, LATENT), torch.nan)
    b = torch.full((3, HEADS * (NOPE + VALUE), MAX_RANK), torch.nan)
    for slot, rank in enumerate(RANKS):
        a[slot, :rank] = torch.randn(rank, LATENT, generator=generator)
        b[slot, :, :rank] = torch.randn(HEADS * (NOPE + VALUE), rank, generator=generator)
    batch = SimpleNamespace(
        weight_indices_cpu=torch.tensor([slot for slot, _ in BATCH]),
        seg_lens_cpu=torch.tensor([tokens for _, tokens in BATCH]),
        lora_ranks_cpu=torch.tensor(RANKS),
        scalings_cpu=torch.tensor(SCALINGS),
    )
    backend = SimpleNamespace(get_batch_info=lambda: batch)
    layer = SimpleNamespace(lora_backend=backend, set_lora=True, A_buffer=a, B_buffer=b)
    return SimpleNamespace(
        kv_b_proj=layer, qk_nope_head_dim=NOPE, v_head_dim=VALUE, num_local_heads=HEADS, kv_lora_rank=LATENT
    )


def merged_delta(attention: SimpleNamespace, slot: int) -> torch.Tensor:
    """scaling * B A by head: [N, K + V, D]."""
    rank = RANKS[slot]
    layer = attention.kv_b_proj
    product = SCALINGS[slot] * layer.B_buffer[slot, :, :rank] @ layer.A_buffer[slot, :rank]
    return product.view(HEADS, NOPE + VALUE, LATENT)


def token_slots() -> list[int]:
    return [slot for slot, tokens in BATCH for _ in range(tokens)]


def test_the_query_gets_what_merged_weights_would_give(attention: SimpleNamespace) -> None:
    query = torch.randn(len(token_slots()), HEADS, NOPE)
    absorbed = torch.randn(HEADS, len(token_slots()), LATENT).transpose(0, 1)  # strided, as SGLang's is
    expected = absorbed.clone()
    for token, slot in enumerate(token_slots()):
        expected[token] += torch.einsum("nk,nkd->nd", query[token], merged_delta(attention, slot)[:, :NOPE])
    result = apply_q_correction(attention, query, absorbed)
    assert result is absorbed
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


def test_the_output_gets_what_merged_weights_would_give(attention: SimpleNamespace) -> None:
    latent = torch.randn(len(token_slots()), HEADS, LATENT)
    flat = torch.randn(len(token_slots()), HEADS * VALUE)
    expected = flat.clone()
    for token, slot in enumerate(token_slots()):
        part = torch.einsum("nd,nvd->nv", latent[token], merged_delta(attention, slot)[:, NOPE:])
        expected[token] += part.flatten()
    result = apply_v_correction(attention, latent, flat)
    assert result is flat
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


def test_without_a_batch_nothing_changes(attention: SimpleNamespace) -> None:
    attention.kv_b_proj.lora_backend = SimpleNamespace(get_batch_info=lambda: None)
    absorbed = torch.randn(4, HEADS, LATENT)
    before = absorbed.clone()
    assert torch.equal(apply_q_correction(attention, torch.randn(4, HEADS, NOPE), absorbed), before)
