"""Attention over a pool on the CPU: values, bits that depend on a query's own inputs alone, and what is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from reference.decoder import attention
from reference.instruction_sets import instruction_sets

from kt_runtime.errors import InvalidValueError
from kt_runtime.experts import dense
from kt_runtime.experts.attention import Sequences, attend, contiguous, in_chunks, paged
from kt_runtime.ops.attention import attend_batch

DTYPES = (torch.float32, torch.bfloat16)
SHAPES = [(8, 2, 64, 32), (6, 1, 72, 64)]  # query heads, key heads, key size, value size; the last is absorbed MLA
LENGTHS = [(0, 1), (600, 3), (0, 70), (517, 1)]  # prefix, new tokens
SEVERAL = [(0, 40), (0, 600), (33, 1)]
# Of the second sequence's 600 queries, what is computed in a call of its own: pieces, some of seven, and single ones,
# among them all at the end of 512 keys, which attention computes at once.
PIECES = [(at, size) for size in (50, 64, 300) for at in range(0, 600, size)] + [(at, 7) for at in range(0, 590, 42)]
ALONE = [(at, 1) for at in (*range(0, 505, 13), *range(505, 520), *range(520, 600, 13), 599)]
CUTS = [slice(at, min(at + size, 600)) for at, size in PIECES + ALONE]
TOLERANCE = 3e-6  # of float32 results; 2.7e-6 measured with 40 seeds on portable, AVX2 and AVX-512 kernels


@pytest.fixture(autouse=True)
def the_best_of_this_machine_afterwards() -> Iterator[None]:
    yield
    dense.configure()


@dataclass
class Pool:
    """Sequences whose keys lie in drawn slots of a pool; all other slots are NaN."""

    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    slots: torch.Tensor
    lengths: list[tuple[int, int]]

    def sequences(self) -> Sequences:
        prefixes, queries = torch.tensor(self.lengths).unbind(1)
        return paged(self.slots, torch.arange(len(self.lengths)), prefixes, queries)

    def attended(self) -> torch.Tensor:
        return attend(self.q, self.keys, self.values, self.sequences(), 0.2)

    def first(self, index: int) -> int:
        return sum(queries for _, queries in self.lengths[:index])

    def rows(self, index: int) -> slice:
        return slice(self.first(index), self.first(index + 1))

    def alone(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, and keys and values of one sequence, in order."""
        slots = self.slots[index, : sum(self.lengths[index])]
        return self.q[self.rows(index)], self.keys[slots], self.values[slots]

    def part(self, rows: slice, **options: Any) -> torch.Tensor:
        """Some queries of the second sequence, in a call of their own."""
        sequence = one_sequence(self.slots[1:2], rows.start, rows.stop - rows.start)
        return attend(self.q[self.rows(1)][rows], self.keys, self.values, sequence, 0.2, **options)


def drawn_pool(shape: tuple[int, ...], dtype: torch.dtype, lengths: list[tuple[int, int]] = LENGTHS) -> Pool:
    heads, k_heads, size, v_size = shape
    g = torch.Generator().manual_seed(5)
    counts = [prefix + queries for prefix, queries in lengths]
    free = torch.randperm(sum(counts) + 9, generator=g)[: sum(counts)].split(counts)
    slots = torch.full((len(lengths), max(counts) + 2), -1, dtype=torch.int32)
    keys = torch.full((sum(counts) + 9, k_heads, size), float("nan"), dtype=dtype)
    values = keys[..., :v_size] if k_heads == 1 else torch.full_like(keys, float("nan"))[..., :v_size]
    for index, own in enumerate(free):
        slots[index, : len(own)] = own
        keys[own] = torch.randn(len(own), k_heads, size, generator=g).to(dtype)
        if k_heads > 1:
            values[own] = torch.randn(len(own), k_heads, v_size, generator=g).to(dtype)
    q = torch.randn(sum(queries for _, queries in lengths), heads, size, generator=g).to(dtype)
    return Pool(q, keys, values, slots, lengths)


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_batch_is_float64s_softmax_rounded_once(isa: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    dense.configure(isa, 2)
    pool = drawn_pool(shape, dtype)
    wide = attend(pool.q, pool.keys, pool.values, pool.sequences(), 0.2, out_dtype=torch.float32)
    for index in range(len(LENGTHS)):
        q, k, v = (rows.double() for rows in pool.alone(index))
        expected = attention(q, k, v, 0.2)
        torch.testing.assert_close(wide[pool.rows(index)].double(), expected, atol=TOLERANCE, rtol=0)
    assert pool.attended().dtype == dtype
    assert torch.equal(pool.attended(), wide.to(dtype))


@pytest.mark.parametrize("chunk", [16, 100, 512, 604])
def test_in_chunks_a_query_sees_the_keys_of_its_own_chunk_only(chunk: int) -> None:
    """Against a softmax over the visible keys in float64; 604: no sequence is longer."""
    dense.configure(None, 2)
    pool = drawn_pool(SHAPES[0], torch.float32)
    whole = pool.sequences()
    cut = in_chunks(whole, chunk)
    assert (cut is whole) == (chunk == 604)
    found = attend(pool.q, pool.keys, pool.values, cut, 0.2)
    for index, (prefix, queries) in enumerate(pool.lengths):
        q, k, v = (rows.double() for rows in pool.alone(index))
        for query in range(queries):
            place = prefix + query
            seen = slice(place // chunk * chunk, place + 1)
            expected = attention(q[query : query + 1], k[seen], v[seen], 0.2)
            row = found[pool.first(index) + query]
            torch.testing.assert_close(row.double(), expected[0], atol=TOLERANCE, rtol=0)


def test_in_chunks_bits_depend_neither_on_how_a_prompt_is_cut_nor_on_where_its_keys_lie() -> None:
    pool = drawn_pool(SHAPES[0], torch.bfloat16, [(0, 40), (0, 300), (33, 1)])
    whole = attend(pool.q, pool.keys, pool.values, in_chunks(pool.sequences(), 48), 0.2)[pool.rows(1)]
    q, keys, values = pool.alone(1)
    for count in (1, 7, 48, 64):
        parts = [
            attend(
                q[at : at + count],
                pool.keys,
                pool.values,
                in_chunks(one_sequence(pool.slots[1:2], at, len(q[at : at + count])), 48),
                0.2,
            )
            for at in range(0, 300, count)
        ]
        assert torch.equal(torch.cat(parts), whole), count
    assert torch.equal(attend(q, keys, values, in_chunks(contiguous(1, 300, 300), 48), 0.2), whole)


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_decoding_extending_and_training_give_the_same_bits(
    isa: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """One sequence of 600 tokens: in a batch with others, token by token, in chunks, over ordered keys, by threads."""
    dense.configure(isa, 1)
    pool = drawn_pool(shape, dtype, SEVERAL)
    whole = pool.attended()[pool.rows(1)]
    for rows in CUTS:
        assert torch.equal(pool.part(rows), whole[rows]), rows
    q, keys, values = pool.alone(1)
    q, keys, values = (x.expand(2, *x.shape) for x in (q, keys, values))
    twin = attend_batch(q, keys, values, 0.2)
    assert torch.equal(twin[0].to(dtype), whole) and torch.equal(twin[0], twin[1])
    for threads in (2, 5):
        dense.configure(isa, threads)
        assert torch.equal(pool.attended()[pool.rows(1)], whole)


@functools.cache
def in_windows(dtype: torch.dtype, window: int, has_sinks: bool) -> tuple[Pool, dict[str, Any], list[torch.Tensor]]:
    """Sequences, options of `attend`, and each sequence's results in float64: the same on every instruction set."""
    pool = drawn_pool(SHAPES[0], dtype, [(0, 40), (0, 600), (1900, 2)])
    options: dict[str, Any] = {"sinks": torch.linspace(-3, 4, SHAPES[0][0]) if has_sinks else None, "window": window}
    rows = [[tensor.double() for tensor in pool.alone(index)] for index in range(3)]
    return pool, options, [attention(q, k, v, 0.2, **options) for q, k, v in rows]


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "has_sinks"), [(1, False), (9, True), (128, True), (0, True), (700, False)])
def test_windows_and_sinks(isa: str, dtype: torch.dtype, window: int, has_sinks: bool) -> None:
    """As in float64, and the same bits in chunks, by threads and in training."""
    dense.configure(isa, 1)
    pool, options, exact = in_windows(dtype, window, has_sinks)
    wide = attend(pool.q, pool.keys, pool.values, pool.sequences(), 0.2, out_dtype=torch.float32, **options)
    for index, expected in enumerate(exact):
        torch.testing.assert_close(wide[pool.rows(index)].double(), expected, atol=TOLERANCE, rtol=0)
    whole = wide[pool.rows(1)].to(dtype)
    for rows in CUTS:
        assert torch.equal(pool.part(rows, **options), whole[rows]), rows
    q, keys, values = pool.alone(1)
    assert torch.equal(attend_batch(q[None], keys[None], values[None], 0.2, **options)[0].to(dtype), whole)
    dense.configure(isa, 5)
    again = attend(pool.q, pool.keys, pool.values, pool.sequences(), 0.2, out_dtype=torch.float32, **options)
    assert torch.equal(again, wide)


def test_a_key_before_the_window_is_not_read() -> None:
    pool = drawn_pool(SHAPES[0], torch.bfloat16, [(600, 3)])
    clean = attend(pool.q, pool.keys, pool.values, pool.sequences(), 0.2, window=20)
    for place in (3, 100, 520, 581 - 1):
        pool.keys[pool.slots[0, place].long()] = float("inf")
        pool.values[pool.slots[0, place].long()] = float("nan")
    assert torch.equal(attend(pool.q, pool.keys, pool.values, pool.sequences(), 0.2, window=20), clean)
    pool.values[pool.slots[0, 581].long()] = float("nan")
    spoiled = attend(pool.q, pool.keys, pool.values, pool.sequences(), 0.2, window=20)
    assert spoiled[0].isnan().all() and torch.equal(spoiled[1:], clean[1:])


def test_a_negative_window_is_refused() -> None:
    pool = drawn_pool(SHAPES[0], torch.float32)
    with pytest.raises(InvalidValueError, match="window is -1; allowed: 0 or more"):
        attend(pool.q, pool.keys, pool.values, pool.sequences(), 0.2, window=-1)


def one_sequence(table: torch.Tensor, prefix: int, queries: int) -> Sequences:
    return paged(table, torch.tensor([0]), torch.tensor([prefix]), torch.tensor([queries]))


def test_nan_in_one_sequence_stays_there() -> None:
    pool = drawn_pool(SHAPES[0], torch.bfloat16)
    clean = pool.attended()
    pool.q[pool.first(1)] = float("nan")
    pool.keys[pool.slots[2, 30].long()] = float("inf")
    pool.values[pool.slots[2, 40].long()] = float("nan")
    found = pool.attended()
    first, third = pool.first(1), pool.first(2)
    assert found[first].isnan().all()
    assert not torch.equal(found[third + 30], clean[third + 30]) and found[third + 40 : third + 70].isnan().all()
    others = [row for row in range(len(clean)) if row != first and not third + 30 <= row < third + 70]
    assert torch.equal(found[others], clean[others])


def test_strided_tensors_and_rows_of_no_sequence() -> None:
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(rows, heads, 48, generator=g) for rows, heads in ((6, 4), (9, 2), (9, 2)))
    part = Sequences(torch.tensor([[1, 2, 3, 0], [4, 1, 8, 0]]), None)
    whole = attend(q[..., :32].contiguous(), k[..., :32].contiguous(), v[..., 8:40].contiguous(), part, 0.3)
    assert torch.equal(attend(q[..., :32], k[..., :32], v[..., 8:40], part, 0.3), whole)
    assert torch.equal(attend(q[..., :32].mT.contiguous().mT, k[..., :32], v[..., 8:40], part, 0.3), whole)
    assert torch.equal(whole[[0, 3, 5]], torch.zeros(3, 4, 32))
    assert whole[[1, 2, 4]].abs().sum(-1).gt(0).all()


def test_sizes_of_zero_give_empty_results() -> None:
    q, k = torch.ones(3, 4, 16), torch.ones(9, 2, 16)
    nobody = paged(torch.zeros(1, 9, dtype=torch.int32), *(torch.empty(0, dtype=torch.int64) for _ in range(3)))
    for none in (contiguous(1, 0, 9), contiguous(0, 3, 9), nobody):
        assert attend(q[:0], k, k, none, 0.3).shape == (0, 4, 16)
    assert attend(q[:, :0], k, k, contiguous(1, 3, 9), 0.3).shape == (3, 0, 16)
    assert attend(q, k, k[..., :0], contiguous(1, 3, 9), 0.3).shape == (3, 4, 0)
    assert torch.equal(attend(q[..., :0], k[..., :0], k, contiguous(1, 3, 9), 0.3), q)  # equal scores
    assert torch.equal(attend(q, k, k, nobody, 0.3), torch.zeros_like(q))


Q, K = torch.zeros(3, 4, 16), torch.zeros(10, 2, 16)
TABLE = torch.tensor([[0, 1, 2, 10], [3, -1, 5, 6]], dtype=torch.int32)


def of_table(place: int, prefix: int, queries: int) -> Sequences:
    return paged(TABLE, torch.tensor([place]), torch.tensor([prefix]), torch.tensor([queries]))


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "key size": (
        lambda: attend(Q, torch.zeros(10, 2, 15), K, contiguous(1, 3, 3), 1.0),
        r"keys has shape \[10, 2, 15\]; expected \[any, any, 16\]",
    ),
    "heads": (
        lambda: attend(Q, torch.zeros(10, 3, 16), torch.zeros(10, 3, 16), contiguous(1, 3, 3), 1.0),
        "q has 4 heads, which is no multiple of the keys' 3",
    ),
    "no heads": (
        lambda: attend(Q, torch.zeros(10, 0, 16), torch.zeros(10, 0, 16), contiguous(1, 3, 3), 1.0),
        "q has 4 heads, which is no multiple of the keys' 0",
    ),
    "rows of values": (
        lambda: attend(Q, K, K[:9], contiguous(1, 3, 3), 1.0),
        r"values has shape \[9, 2, 16\]; expected \[10, 2, any\]",
    ),
    "dtype of values": (
        lambda: attend(Q, K, K.bfloat16(), contiguous(1, 3, 3), 1.0),
        "values has dtype bfloat16; allowed: float32",
    ),
    "dtype": (lambda: attend(Q.half(), K, K, contiguous(1, 3, 3), 1.0), "q has dtype an unsupported type"),
    "stride": (
        lambda: attend(Q, K.mT.contiguous().mT, K, contiguous(1, 3, 3), 1.0),
        "keys is not contiguous in its last dimension",
    ),
    "log sums": (
        lambda: attend(Q, K, K, contiguous(1, 3, 3), 1.0, log_sums=torch.zeros(3, 3)),
        r"log_sums has shape \[3, 3\]; expected \[3, 4\]",
    ),
    "slot above": (lambda: attend(Q, K, K, of_table(0, 1, 3), 1.0), "sequence 0 has key 3 in slot 10; allowed: 0 to 9"),
    "slot below": (lambda: attend(Q, K, K, of_table(1, 1, 1), 1.0), "sequence 0 has key 1 in slot -1; allowed: 0 to 9"),
    "row of slots": (lambda: attend(Q, K, K, of_table(2, 0, 1), 1.0), "sequence 0 has row 2 of slots; allowed: 0 to 1"),
    "too long": (
        lambda: attend(Q, K, K, of_table(0, 2, 3), 1.0),
        r"sequence 0 has 2 \+ 3 keys; a row of slots has 4",
    ),
    "slots' dtype": (
        lambda: attend(Q, K, K, Sequences(torch.tensor([[0, 3, 0, 0]]), TABLE.long()), 1.0),
        "slots has dtype int64; allowed: int32",
    ),
    "keys beyond the end": (
        lambda: attend(Q, K, K, contiguous(1, 3, 11), 1.0),
        r"sequence 0 has 8 \+ 3 keys from row 0 on; there are 10 rows",
    ),
    "queries": (
        lambda: attend(Q, K, K, contiguous(2, 2, 2), 1.0),
        "sequence 1 has queries 2 to 3; allowed: 2 to 2",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_named_with_its_value(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(InvalidValueError, match=message):
        call()
