"""Chunked attention of the twin: each query sees its own chunk, in rows that fork too."""

from __future__ import annotations

import pytest
import torch
from reference.decoder import attention

from kt_runtime.resident.twin.attention import Seen, attend, places_of, visible_keys
from kt_runtime.resident.twin.batches import Branch

LENGTH, CHUNK = 30, 8
TOLERANCE = 3.5e-6  # 3.6e-7 measured


def drawn(length: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries of four heads, keys and values of two: [1, length, heads, 16]."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(1, length, 4, 16, generator=generator),
        torch.randn(1, length, 2, 16, generator=generator),
        torch.randn(1, length, 2, 16, generator=generator),
    )


def test_a_query_sees_its_own_chunk_and_gradients_stay_inside() -> None:
    q, k, v = (x.requires_grad_() for x in drawn(LENGTH))
    out = attend(q, k, v, 0.3, seen=Seen(chunk=CHUNK))
    for place in range(LENGTH):
        seen = slice(place // CHUNK * CHUNK, place + 1)
        expected = attention(q[0, place : place + 1].double(), k[0, seen].double(), v[0, seen].double(), 0.3)
        torch.testing.assert_close(out[0, place].double(), expected[0], atol=TOLERANCE, rtol=0)
    (by_keys,) = torch.autograd.grad(out[:, 10].sum(), [v])
    assert by_keys[0].abs().sum((1, 2)).nonzero().flatten().tolist() == [8, 9, 10]


@pytest.mark.parametrize("prefix", [3, 8, 13])
def test_a_row_that_forks_has_the_bits_of_two_rows(prefix: int) -> None:
    """The first sequence has 20 tokens, the second `prefix` of them and others."""
    second = 20
    q, k, v = drawn(LENGTH)
    found = attend(q, k, v, 0.3, (Branch(prefix, second),), Seen(chunk=CHUNK))
    alone = attend(q[:, :second], k[:, :second], v[:, :second], 0.3, seen=Seen(chunk=CHUNK))
    assert torch.equal(found[:, :second], alone)
    q, k, v = (torch.cat([x[:, :prefix], x[:, second:]], dim=1) for x in (q, k, v))
    assert torch.equal(found[:, second:], attend(q, k, v, 0.3, seen=Seen(chunk=CHUNK))[:, prefix:])


@pytest.mark.parametrize("prefix", [3, 8, 13])
def test_a_mask_lets_the_same_keys_be_seen(prefix: int) -> None:
    """For attention beside a GPU."""
    branch, second = Branch(prefix, 20), 20
    q, k, v = drawn(LENGTH)
    mask = visible_keys((branch,), LENGTH, torch.device("cpu"), chunk=CHUNK)
    keys, values = (x.repeat_interleave(2, dim=2).transpose(1, 2) for x in (k, v))
    masked = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), keys, values, attn_mask=mask, scale=0.3
    )
    expected = attend(q, k, v, 0.3, (branch,), Seen(chunk=CHUNK))
    torch.testing.assert_close(masked.transpose(1, 2), expected, atol=TOLERANCE, rtol=0)
    places = places_of((branch,), LENGTH, torch.device("cpu"))
    assert places[0].tolist() == [*range(second), *range(prefix, prefix + LENGTH - second)]
