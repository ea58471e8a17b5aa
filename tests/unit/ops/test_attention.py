"""Attention and its gradients against the definition in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference.decoder import attention as attention_of
from reference.drawn import drawn
from reference.instruction_sets import instruction_sets

from kt_runtime.errors import InvalidValueError
from kt_runtime.experts import attention, dense
from kt_runtime.experts.attention import attend, paged
from kt_runtime.ops.attention import attend_batch, attend_batch_backward

# query heads, key heads, key size, value size; the last is absorbed MLA: one key head, values shorter than keys
SHAPES = [(4, 4, 16, 16), (8, 2, 32, 32), (6, 1, 24, 16)]
TOLERANCE = 4.5e-6  # 1.44e-6 measured
GRADIENT_TOLERANCE = 5e-5  # 7e-6 measured, 5.7e-6 with a window and sinks


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def definition(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, cap: float = 0.0) -> torch.Tensor:
    return attention_of(q.double(), k.double(), v.double(), scaling, cap)


def tensors(shape: tuple[int, ...], tokens: int, keys: int, seed: int = 0) -> Inputs:
    heads, k_heads, size, v_size = shape
    g = torch.Generator().manual_seed(seed)
    k = torch.randn(keys, k_heads, size, generator=g)
    return torch.randn(tokens, heads, size, generator=g), k, torch.randn(keys, k_heads, v_size, generator=g)


def attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, cap: float = 0.0, **kwargs: Any
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


def gradients(
    inputs: Inputs, grad_out: torch.Tensor, scaling: float = 0.3
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of a batch: q [B, T, N, D], k and v [B, L, K, .]."""
    log_sums = torch.empty(inputs[0].shape[:-1])
    out = attend_batch(*inputs, scaling, log_sums=log_sums)
    return attend_batch_backward(grad_out, *inputs, out, log_sums, scaling)


# Sums of up to 250 products in float32, of gradients up to 12. bf16: rounded once more, 2^-8 is the bound.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 0.0), (torch.bfloat16, 2.0**-8)])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("tokens", "prefix"), [(1, 0), (19, 0), (48, 0), (97, 6), (150, 100), (2, 61)])
def test_gradients_are_those_of_the_definition(
    shape: tuple[int, ...], tokens: int, prefix: int, dtype: torch.dtype, tolerance: float
) -> None:
    rows = [as_dtype(dtype, *tensors(shape, tokens, tokens + prefix, seed)) for seed in range(2)]
    batch = (
        torch.stack([row[0] for row in rows]),
        torch.stack([row[1] for row in rows]),
        torch.stack([row[2] for row in rows]),
    )
    grad_out = drawn(2, tokens, shape[0], shape[3], seed=4, dtype=dtype)
    found = gradients(batch, grad_out)
    for index, row in enumerate(rows):
        q, k, v = wide = [x.double().requires_grad_() for x in row]
        expected = torch.autograd.grad(attention_of(q, k, v, 0.3), wide, grad_out[index].double())
        for by_x, wanted in zip(found, expected, strict=True):
            assert by_x.dtype == dtype
            torch.testing.assert_close(by_x[index].double(), wanted, atol=GRADIENT_TOLERANCE, rtol=tolerance)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("tokens", "prefix", "window"), [(19, 0, 4), (97, 6, 48), (150, 100, 1), (150, 100, 0)])
def test_gradients_with_a_window_and_sinks_are_those_of_the_definition(
    shape: tuple[int, ...], tokens: int, prefix: int, window: int
) -> None:
    inputs, sinks = tensors(shape, tokens, tokens + prefix), torch.linspace(-2, 3, shape[0])
    q, k, v = (x[None] for x in inputs)
    log_sums = torch.empty(q.shape[:-1])
    out = attend_batch(q, k, v, 0.3, log_sums=log_sums, sinks=sinks, window=window)
    grad_out = drawn(1, tokens, shape[0], shape[3], seed=4)
    found = attend_batch_backward(grad_out, q, k, v, out, log_sums, 0.3, window)
    q, k, v = wide = [x.double().requires_grad_() for x in inputs]
    expected_out = attention_of(q, k, v, 0.3, window=window, sinks=sinks)
    torch.testing.assert_close(out[0].double(), expected_out, atol=2 * TOLERANCE, rtol=0)  # 2.15e-6 measured
    expected = torch.autograd.grad(expected_out, wide, grad_out[0].double())
    for by_x, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(by_x[0].double(), wanted, atol=GRADIENT_TOLERANCE, rtol=0)


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("shape", [(8, 8, 16, 16), (12, 3, 32, 32), (20, 1, 40, 24)])
def test_gradients_depend_neither_on_threads_nor_on_other_sequences(shape: tuple[int, ...], isa: str) -> None:
    q, k, v = (torch.stack(part) for part in zip(*(tensors(shape, 70, 80, seed) for seed in range(3)), strict=True))
    grad_out = drawn(3, 70, shape[0], shape[3], seed=4)
    try:
        dense.configure(isa, 1)
        whole = gradients((q, k, v), grad_out)
        dense.configure(isa, 3)
        assert all(torch.equal(*pair) for pair in zip(gradients((q, k, v), grad_out), whole, strict=True))
        alone = gradients((q[1:2], k[1:2], v[1:2]), grad_out[1:2])
        assert all(torch.equal(one[0], of_all[1]) for one, of_all in zip(alone, whole, strict=True))
    finally:
        dense.configure()


def test_sequences_whose_sums_fill_64_mib_are_taken_one_after_another() -> None:
    q, k, v = (
        torch.stack(part) for part in zip(*(tensors((16, 1, 256, 256), 2, 1100, n) for n in range(3)), strict=True)
    )
    grad_out = drawn(*q.shape, seed=4)
    whole = gradients((q, k, v), grad_out)
    for n in range(3):
        own = slice(n, n + 1)
        alone = gradients((q[own], k[own], v[own]), grad_out[own])
        assert all(torch.equal(one, of_all[own]) for one, of_all in zip(alone, whole, strict=True))


def test_without_query_heads_keys_and_values_have_zeros() -> None:
    _, k, v = tensors(SHAPES[1], 5, 5)
    no_heads, place = torch.zeros(5, 0, 32), attention.contiguous(1, 5, 5)
    by_q, by_k, by_v = attention.attend_backward(no_heads, no_heads, k, v, no_heads, torch.zeros(5, 0), place, 0.3)
    assert by_q.shape == (5, 0, 32)
    assert torch.equal(by_k, torch.zeros_like(k)) and torch.equal(by_v, torch.zeros_like(v))


def test_values_that_are_columns_of_the_keys_have_a_gradient_of_their_own() -> None:
    q, k, _ = tensors(SHAPES[2], 21, 21)
    grad_out = drawn(1, 21, 6, 16, seed=4)
    shared = gradients((q[None], k[None], k[None, ..., :16]), grad_out)
    apart = gradients((q[None], k[None], k[None, ..., :16].clone()), grad_out)
    assert all(torch.equal(*pair) for pair in zip(shared, apart, strict=True))


def test_a_gradient_that_does_not_fit_is_named() -> None:
    q, k, v = (x.flatten(0, 1) for x in (torch.zeros(1, 4, 4, 8), torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 2, 8)))
    with pytest.raises(InvalidValueError, match=r"by_out has shape \[4, 4, 9\]; expected \[4, 4, 8\]"):
        attention.attend_backward(
            torch.zeros(4, 4, 9), q, k, v, torch.zeros(4, 4, 8), torch.zeros(4, 4), attention.contiguous(1, 4, 4), 1.0
        )


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [[0, 2, 0, 0], [2, 2, 2, 1]],
            "sequence 1 has queries from row 2 on and 4 keys from row 1 on; .* rows 2 and 2",
        ),
        ([[0, 2, 0, 0], [2, 2, 0, 2], [4, 0, 3, 4]], "sequence 2 .* at most 2 keys"),
        ([[0, 0, 9, 700], [0, 4, 2, 0]], "sequence 0 .* expected rows 0 and 0"),
        ([[0, 4, 0, 0]], "the sequences have 4 queries and 4 keys; with gradients they cover all, 4 and 6"),
        ([[0, 3, 3, 0]], "the sequences have 3 queries and 6 keys; with gradients they cover all, 4 and 6"),
    ],
)
def test_sequences_with_gradients_cover_every_row_once(rows: list[list[int]], message: str) -> None:
    """Four queries, six keys. A sequence without queries may have keys, whose gradients are zeros."""
    q, k, v = tensors(SHAPES[1], 4, 6)
    out, log_sums = torch.zeros(4, 8, 32), torch.zeros(4, 8)
    with pytest.raises(InvalidValueError, match=message):
        attention.attend_backward(q, q, k, v, out, log_sums, attention.Sequences(torch.tensor(rows), None), 0.3)
    whole = attention.Sequences(torch.tensor([[0, 4, 0, 0], [4, 0, 2, 4]]), None)
    _, by_k, by_v = attention.attend_backward(q, q, k, v, out, log_sums, whole, 0.3)
    assert not by_k[4:].any() and not by_v[4:].any() and by_v[:4].all()


@pytest.mark.parametrize("shape", SHAPES)
def test_log_sums_are_those_of_the_visible_keys(shape: tuple[int, ...]) -> None:
    q, k, v = tensors(shape, 7, 9)
    log_sums = torch.empty(7, shape[0])
    attended(q, k, v, 0.3, log_sums=log_sums[None])
    scores = torch.einsum("tnd,lnd->tnl", q, k.repeat_interleave(shape[0] // shape[1], 1)).double() * 0.3
    hidden = torch.ones(7, 9, dtype=torch.bool).triu(3)[:, None]
    expected = scores.masked_fill(hidden, float("-inf")).logsumexp(-1)
    torch.testing.assert_close(log_sums.double(), expected, atol=TOLERANCE, rtol=0)
