"""Attention and its gradients against the definition in float64."""

from __future__ import annotations

import pytest
import torch

from kt_runtime.experts.attention import attend, paged
from kt_runtime.ops import attention
from kt_runtime.ops.attention import (
    _blocks,
    attend_batch,
    attend_batch_backward,
    attend_sequence_backward,
)

# query heads, key heads, key size, value size; the last is absorbed MLA: one key head, values shorter than keys
SHAPES = [(4, 4, 16, 16), (8, 2, 32, 32), (6, 1, 24, 16)]
TOLERANCE = 2e-6  # 6.9e-7 measured; gradients 3.2e-6, of up to 7


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def definition(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, cap: float = 0.0) -> torch.Tensor:
    """One query at a time, one head at a time."""
    tokens, heads, _ = q.shape
    group, prefix = heads // k.shape[1], k.shape[0] - tokens
    out = torch.empty(tokens, heads, v.shape[-1], dtype=torch.float64)
    for t in range(tokens):
        for h in range(heads):
            seen = slice(0, prefix + t + 1)
            scores = k[seen, h // group].double() @ q[t, h].double() * scaling
            if cap:
                scores = cap * torch.tanh(scores / cap)
            out[t, h] = torch.softmax(scores, 0) @ v[seen, h // group].double()
    return out


def tensors(shape: tuple[int, ...], tokens: int, keys: int, seed: int = 0) -> Inputs:
    heads, k_heads, size, v_size = shape
    g = torch.Generator().manual_seed(seed)
    k = torch.randn(keys, k_heads, size, generator=g)
    return torch.randn(tokens, heads, size, generator=g), k, torch.randn(keys, k_heads, v_size, generator=g)


def attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, cap: float = 0.0, **kwargs: torch.Tensor
) -> torch.Tensor:
    """One sequence."""
    return attend_batch(q[None], k[None], v[None], scaling, cap, **kwargs)[0]


def as_dtype(dtype: torch.dtype, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Inputs:
    return q.to(dtype), k.to(dtype), v.to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("tokens", "prefix"), [(1, 0), (7, 0), (5, 9), (1, 20), (33, 3)])
@pytest.mark.parametrize("cap", [0.0, 2.0])
def test_extend_is_causal_attention_over_prefix_and_new_keys(
    shape: tuple[int, ...], tokens: int, prefix: int, cap: float
) -> None:
    q, k, v = tensors(shape, tokens, prefix + tokens)
    found = attended(q, k, v, 0.3, cap)
    torch.testing.assert_close(found.double(), definition(q, k, v, 0.3, cap), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("scores_of_one", [100, 9600, 1 << 17])
@pytest.mark.parametrize("prefix", [5, 64, 100, 333])
def test_blocks_end_at_the_same_keys_whatever_is_cached(prefix: int, scores_of_one: int) -> None:
    whole = _blocks(0, 600, scores_of_one)
    blocks = _blocks(prefix, 600 - prefix, scores_of_one)
    assert [start for start, _ in blocks] == [0, *(stop for _, stop in blocks[:-1])]
    assert [prefix + stop for _, stop in blocks] == [stop for _, stop in whole if stop > prefix]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_cached_prefix_gives_what_the_whole_sequence_gives(shape: tuple[int, ...]) -> None:
    q, k, v = tensors(shape, 24, 24)
    assert torch.equal(attended(q[10:], k, v, 0.25), attended(q, k, v, 0.25)[10:])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("cap", [0.0, 2.0])
def test_a_decode_batch_gives_each_sequence_its_own_answer(shape: tuple[int, ...], cap: float) -> None:
    lengths = torch.tensor([1, 12, 7])
    rows = [tensors(shape, 1, int(length), seed) for seed, length in enumerate(lengths)]
    keys, values = (torch.full((3 * 12, *rows[0][part].shape[1:]), 99.0) for part in (1, 2))  # padding must not leak
    slots = torch.arange(36, dtype=torch.int32).view(12, 3).T
    for own, (_, k, v) in zip(slots.long(), rows, strict=True):
        keys[own[: len(k)]], values[own[: len(v)]] = k, v
    sequences = paged(slots.contiguous(), torch.arange(3), lengths - 1, torch.ones_like(lengths))
    found = attend(torch.cat([q for q, _, _ in rows]), keys, values, sequences, 0.3, cap)
    for index, (q, k, v) in enumerate(rows):
        expected = definition(q, k, v, 0.3, cap)[0]
        torch.testing.assert_close(found[index].double(), expected, atol=TOLERANCE, rtol=0)


def test_bfloat16_inputs_are_computed_in_float32() -> None:
    q, k, v = (tensor.bfloat16() for tensor in tensors(SHAPES[1], 6, 9))
    torch.testing.assert_close(attended(q, k, v, 0.3).double(), definition(q, k, v, 0.3), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("budget", [1, 1000, 1 << 23])
def test_gradients_are_those_of_the_definition(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], budget: int
) -> None:
    inputs = tensors(shape, 19, 19)
    grad_out = torch.randn(19, shape[0], shape[3], generator=torch.Generator().manual_seed(4))
    q, k, v = (tensor.double().requires_grad_() for tensor in inputs)
    expected = torch.autograd.grad(differentiable(q, k, v, 0.3), (q, k, v), grad_out.double())
    monkeypatch.setattr(attention, "SCORE_BUDGET", budget)
    for found, wanted in zip(attend_sequence_backward(grad_out, *inputs, 0.3), expected, strict=True):
        torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=0)


# Gradients are sums in float32, in another order, rounded once to the inputs' dtype.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2.0**-7)])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("prefix", [0, 6])
def test_a_batch_has_each_sequence_s_gradients(
    shape: tuple[int, ...], prefix: int, dtype: torch.dtype, tolerance: float
) -> None:
    rows = [as_dtype(dtype, *tensors(shape, 150, 150 + prefix, seed)) for seed in range(2)]
    q, k, v = (torch.stack([row[part] for row in rows]) for part in range(3))
    log_sums = torch.empty(2, 150, shape[0])
    out = attend_batch(q, k, v, 0.3, log_sums=log_sums)
    grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(4)).to(dtype)
    found = attend_batch_backward(grad_out, q, k, v, out, log_sums, 0.3)
    for index, row in enumerate(rows):
        for by_x, wanted in zip(found, attend_sequence_backward(grad_out[index], *row, 0.3), strict=True):
            assert by_x.dtype == dtype
            torch.testing.assert_close(by_x[index].float(), wanted.float(), atol=1e-5, rtol=tolerance)


@pytest.mark.parametrize("shape", SHAPES)
def test_log_sums_are_those_of_the_visible_keys(shape: tuple[int, ...]) -> None:
    q, k, v = tensors(shape, 7, 9)
    log_sums = torch.empty(7, shape[0])
    attended(q, k, v, 0.3, log_sums=log_sums[None])
    scores = torch.einsum("tnd,lnd->tnl", q, k.repeat_interleave(shape[0] // shape[1], 1)).double() * 0.3
    hidden = torch.ones(7, 9, dtype=torch.bool).triu(3)[:, None]
    expected = scores.masked_fill(hidden, float("-inf")).logsumexp(-1)
    torch.testing.assert_close(log_sums.double(), expected, atol=TOLERANCE, rtol=0)


def differentiable(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("tnd,lnd->ntl", q, k.repeat_interleave(group, 1)) * scaling
    scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), float("-inf"))
    return torch.einsum("ntl,lnv->tnv", scores.softmax(-1), v.repeat_interleave(group, 1))
