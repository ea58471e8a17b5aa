"""The choice of keys by an indexer, and attention among the chosen: against float64, and the bits of a query's result,
which depend on its own inputs alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from reference.instruction_sets import instruction_sets
from reference.resident import indexer as exact

from kt_runtime.errors import InvalidValueError
from kt_runtime.experts import dense
from kt_runtime.experts.attention import (
    Sequences,
    attend,
    attend_backward,
    contiguous,
    paged,
    prepare_index_rows,
    select_keys,
)

TOP_K = 37
LENGTHS = [(0, 3), (30, 60), (1700, 9), (900, 1), (0, 37), (36, 1)]  # prefix, new tokens
HEADS, SIZE = 8, 32  # of the indexer
QUERY_HEADS, KEY_SIZE, VALUE_SIZE = 4, 40, 24
TOLERANCE = 1e-5  # of attention's results in float32; 2.1e-6 measured
GRADIENT_TOLERANCE = 5e-6  # relative to autograd in float64; 6e-7 measured
each_isa = pytest.mark.parametrize("isa", instruction_sets())
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@pytest.fixture(autouse=True)
def the_best_of_this_machine_afterwards() -> Iterator[None]:
    yield
    dense.configure()


@dataclass
class Batch:
    """Sequences whose keys lie in drawn slots of a pool; all other slots are NaN."""

    q: torch.Tensor
    weights: torch.Tensor
    keys: torch.Tensor
    slots: torch.Tensor
    lengths: list[tuple[int, int]]

    def sequences(self) -> Sequences:
        prefixes, queries = torch.tensor(self.lengths).unbind(1)
        return paged(self.slots, torch.arange(len(self.lengths)), prefixes, queries)

    def rows(self, index: int) -> slice:
        first = sum(queries for _, queries in self.lengths[:index])
        return slice(first, first + self.lengths[index][1])

    def own(self, index: int) -> torch.Tensor:
        return self.slots[index, : sum(self.lengths[index])]


def drawn(dtype: torch.dtype, lengths: list[tuple[int, int]] = LENGTHS, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    tokens, most = sum(queries for _, queries in lengths), max(sum(pair) for pair in lengths)
    rows = len(lengths) * most + 5
    order = torch.randperm(rows, generator=generator)[: len(lengths) * most].view(len(lengths), most)
    keys = torch.full((rows, SIZE), float("nan"))
    for index, pair in enumerate(lengths):
        keys[order[index, : sum(pair)]] = torch.randn(sum(pair), SIZE, generator=generator)
    q = torch.randn(tokens, HEADS, SIZE, generator=generator)
    weights = torch.randn(tokens, HEADS, generator=generator)
    return Batch(q.to(dtype), weights, keys.to(dtype), order.to(torch.int32), lengths)


def choice(batch: Batch, top_k: int = TOP_K) -> torch.Tensor:
    found = select_keys(batch.q, batch.weights, batch.keys, batch.sequences(), top_k)
    assert found is not None
    return found


def choosing(batch: Batch) -> list[int]:
    """Rows of the queries that see more than TOP_K keys."""
    positions = [prefix + t for prefix, queries in batch.lengths for t in range(queries)]
    return [row for row, position in enumerate(positions) if position >= TOP_K]


@each_isa
@each_dtype
def test_the_chosen_keys_are_those_of_float64(isa: str, dtype: torch.dtype) -> None:
    dense.configure(isa)
    batch = drawn(dtype)
    found = choice(batch)
    assert len(choosing(batch)) == 63
    for index in range(len(LENGTHS)):
        rows, own = batch.rows(index), batch.own(index)
        wide = (batch.q[rows].double(), batch.weights[rows].double(), batch.keys[own].double())
        expected = exact.chosen(*wide, TOP_K)
        for t, positions in enumerate(expected):
            if len(positions) == TOP_K and LENGTHS[index][0] + t >= TOP_K:
                assert found[rows][t].tolist() == own[positions].tolist()


@each_isa
def test_of_equal_scores_the_first_keys_are_chosen(isa: str) -> None:
    dense.configure(isa)
    keys = torch.randn(3, SIZE, generator=torch.Generator().manual_seed(1)).repeat(40, 1)
    q, weights = torch.ones(1, 1, SIZE), torch.ones(1, 1)
    best = keys[:3].sum(1).argmax().item()
    found = select_keys(q, weights, keys, contiguous(1, 1, len(keys)), 25)
    assert found is not None and found.tolist() == [[best + 3 * place for place in range(25)]]
    # All scores are 0: none of the products is above it.
    found = select_keys(-q, weights, keys.abs(), contiguous(1, 1, len(keys)), 25)
    assert found is not None and found.tolist() == [list(range(25))]


@each_isa
def test_keys_whose_score_is_nan_come_last(isa: str) -> None:
    dense.configure(isa)
    keys = torch.ones(50, SIZE)
    keys[::5] = float("nan")
    found = select_keys(torch.ones(1, 2, SIZE), torch.ones(1, 2), keys, contiguous(1, 1, 50), 41)
    assert found is not None
    assert found.tolist() == [sorted([*(place for place in range(50) if place % 5), 0])]


@each_isa
@each_dtype
def test_a_choice_depends_on_its_own_query_alone(isa: str, dtype: torch.dtype) -> None:
    """Not on the batch, on how a prompt is cut, on where the keys lie, or on the number of threads."""
    dense.configure(isa, 3)
    batch = drawn(dtype)
    together = choice(batch)
    dense.configure(isa, 1)
    for index, (prefix, queries) in enumerate(LENGTHS):
        own = batch.own(index)
        for cut in (1, 4, 64):
            for first in range(0, queries, cut):
                count = min(cut, queries - first)
                rows = slice(batch.rows(index).start + first, batch.rows(index).start + first + count)
                keys = batch.keys[own[: prefix + first + count]]
                sequences = contiguous(1, count, len(keys))
                found = select_keys(batch.q[rows], batch.weights[rows], keys, sequences, TOP_K)
                for t in range(count):
                    if prefix + first + t >= TOP_K:
                        assert found is not None
                        assert torch.equal(own[found[t].long()], together[rows][t])


def test_without_a_query_that_sees_more_keys_nothing_is_chosen() -> None:
    batch = drawn(torch.float32, [(0, TOP_K), (TOP_K - 1, 1)])
    assert select_keys(batch.q, batch.weights, batch.keys, batch.sequences(), TOP_K) is None


def attention_inputs(batch: Batch, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    q = torch.randn(len(batch.q), QUERY_HEADS, KEY_SIZE, generator=generator).to(dtype)
    keys = torch.randn(len(batch.keys), 1, KEY_SIZE, generator=generator).to(dtype)
    return q, keys, keys[..., :VALUE_SIZE]


@each_isa
def test_attention_reads_the_chosen_keys_only(isa: str) -> None:
    dense.configure(isa)
    batch = drawn(torch.float32)
    q, keys, values = attention_inputs(batch, torch.float32)
    found = attend(q, keys, values, batch.sequences(), 0.3, chosen=choice(batch))
    largest = 0.0
    for index in range(len(LENGTHS)):
        rows, own = batch.rows(index), batch.own(index)
        seen = exact.chosen(batch.q[rows].double(), batch.weights[rows].double(), batch.keys[own].double(), TOP_K)
        wide = (q[rows].double(), keys[own, 0].double(), values[own, 0].double())
        largest = max(largest, (found[rows] - exact.attend(*wide, seen, 0.3)).abs().max().item())
    print(f"{isa}: largest error {largest:.2g}")
    assert largest <= TOLERANCE
    plain = attend(q, keys, values, batch.sequences(), 0.3)
    assert (plain - found).abs().amax((1, 2)).nonzero().flatten().tolist() == choosing(batch)


@each_isa
@each_dtype
def test_where_all_keys_are_chosen_the_bits_are_those_of_dense_attention(isa: str, dtype: torch.dtype) -> None:
    dense.configure(isa, 3)
    batch = drawn(dtype)
    q, keys, values = attention_inputs(batch, dtype)
    plain = attend(q, keys, values, batch.sequences(), 0.3)
    most = max(sum(pair) for pair in LENGTHS)
    for top_k in (most, most + 100):
        assert select_keys(batch.q, batch.weights, batch.keys, batch.sequences(), top_k) is None
        nothing = torch.full((len(q), top_k), -1, dtype=torch.int32)  # of which no row is read
        assert torch.equal(attend(q, keys, values, batch.sequences(), 0.3, chosen=nothing), plain)
    # A query alone whose choice is all of its keys has the bits of the whole sequence.
    sequences = paged(batch.slots, torch.tensor([1]), torch.tensor([89]), torch.tensor([1]))
    row = batch.rows(1).stop - 1
    one = attend(q[row : row + 1], keys, values, sequences, 0.3)
    all_keys = batch.own(1)[None].contiguous()
    alone = paged(all_keys, torch.tensor([0]), torch.tensor([89]), torch.tensor([1]))
    assert torch.equal(one, plain[row : row + 1])
    assert torch.equal(attend(q[row : row + 1], keys, values, alone, 0.3), one)


@each_isa
@pytest.mark.parametrize("shift", [0, 1])
def test_gradients_are_those_of_autograd_through_the_chosen_keys(isa: str, shift: int) -> None:
    """With `shift`, of another choice than the one that autograd has: then they differ."""
    dense.configure(isa)
    lengths, scaling = [(0, 90), (0, 20), (0, 60)], 0.3
    batch = drawn(torch.float32, lengths)
    q, _, _ = attention_inputs(batch, torch.float32)
    generator = torch.Generator().manual_seed(3)
    tokens = len(q)
    keys = torch.randn(tokens, 1, KEY_SIZE, generator=generator)
    values = torch.randn(tokens, 1, VALUE_SIZE, generator=generator)
    by_out = torch.randn(tokens, QUERY_HEADS, VALUE_SIZE, generator=generator)
    counts = torch.tensor([queries for _, queries in lengths])
    firsts = counts.cumsum(0) - counts
    sequences = Sequences(torch.stack([firsts, counts, torch.zeros_like(counts), firsts], dim=1), None)
    index_keys = torch.randn(tokens, SIZE, generator=generator)
    chosen = select_keys(batch.q, batch.weights, index_keys, sequences, TOP_K)
    assert chosen is not None
    log_sums = torch.empty(tokens, QUERY_HEADS)
    out = attend(q, keys, values, sequences, scaling, out_dtype=torch.float32, log_sums=log_sums, chosen=chosen)
    if shift:
        chosen = chosen.clone()
        chosen[89] = torch.arange(TOP_K)
    found = attend_backward(by_out, q, keys, values, out, log_sums, sequences, scaling, chosen=chosen)

    wide = [x.double().requires_grad_() for x in (q, keys, values)]
    results = []
    for first, count in zip(firsts.tolist(), counts.tolist(), strict=True):
        own = slice(first, first + count)
        seen = exact.chosen(batch.q[own].double(), batch.weights[own].double(), index_keys[own].double(), TOP_K)
        results.append(exact.attend(wide[0][own], wide[1][own, 0], wide[2][own, 0], seen, scaling))
    expected = torch.autograd.grad(torch.cat(results), wide, by_out.double())
    errors = [((a - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True)]
    print(f"{isa}: relative errors {', '.join(f'{error:.2g}' for error in errors)}")
    assert (max(errors) > 100 * GRADIENT_TOLERANCE) if shift else (max(errors) <= GRADIENT_TOLERANCE)


@each_isa
@each_dtype
@pytest.mark.parametrize("interleaved", [False, True])
def test_index_keys_are_normed_and_rotated(isa: str, dtype: torch.dtype, interleaved: bool) -> None:
    dense.configure(isa)
    generator = torch.Generator().manual_seed(4)
    q, k = (torch.randn(11, *shape, generator=generator).to(dtype) for shape in ((HEADS, SIZE), (SIZE,)))
    weight, bias = torch.randn(2, SIZE, generator=generator).unbind()
    angle = torch.rand(20, 4, generator=generator) * 6
    angles = torch.cat([angle.cos(), angle.sin()], dim=1).to(dtype)
    places = torch.randint(20, (11,), generator=generator)
    found_q, found_k = q.clone(), k.clone()
    prepare_index_rows(found_q, found_k, weight, bias, angles, places, interleaved)
    expected = torch.nn.functional.layer_norm(k.double(), (SIZE,), weight.double(), bias.double(), 1e-6).to(dtype)
    assert torch.equal(found_q, dense.rotate(q, angles, places, interleaved))
    rotated = dense.rotate(expected[:, None], angles, places, interleaved)[:, 0]
    assert (found_k.float() - rotated.float()).abs().max() <= (1e-6 if dtype == torch.float32 else 0.04)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": torch.ones(1, 3)}, "weights"),
        ({"keys": torch.ones(60, SIZE, dtype=torch.bfloat16)}, "keys"),
        ({"keys": torch.ones(20, SIZE)}, "there are 20 rows"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change: dict[str, torch.Tensor], message: str) -> None:
    values = {"q": torch.ones(1, 2, SIZE), "weights": torch.ones(1, 2), "keys": torch.ones(60, SIZE)} | change
    with pytest.raises(InvalidValueError, match=message):
        select_keys(values["q"], values["weights"], values["keys"], contiguous(1, 1, 60), 8)
