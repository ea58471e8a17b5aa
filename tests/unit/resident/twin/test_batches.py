from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.cases import examples

from kt_runtime.errors import InvalidValueError
from kt_runtime.resident.twin.batches import Branch, TrainingBatch, split

CPU = torch.device("cpu")


@pytest.mark.parametrize("max_tokens", [1, 20, 64, 1000])
def test_every_token_is_in_exactly_one_microbatch(make_batch: Any, max_tokens: int) -> None:
    batch = make_batch(17, 30, 9, 1, 30)
    microbatches = split(batch, max_tokens, CPU)
    where = np.concatenate([microbatch.where.numpy() for microbatch in microbatches])
    assert sorted(where) == list(range(87))
    for microbatch in microbatches:
        rows, longest = microbatch.tokens.shape
        assert rows == 1 or rows * longest <= max_tokens
        flat, where = microbatch.tokens.flatten(), microbatch.where.numpy()
        assert np.array_equal(flat[microbatch.real].numpy(), batch.tokens[where])
        assert np.array_equal(microbatch.targets.numpy(), batch.targets[where])
        assert np.array_equal(microbatch.weights.numpy(), batch.weights[where])


def test_padding_marks_what_is_not_real(make_batch: Any) -> None:
    (microbatch,) = split(make_batch(3, 5), 100, CPU)
    assert microbatch.padding is not None
    assert microbatch.padding.view(2, 5).tolist() == [[False] * 5, [False] * 3 + [True] * 2]


def test_sequences_of_one_length_have_no_padding(make_batch: Any) -> None:
    (microbatch,) = split(make_batch(4, 4, 4), 100, CPU)
    assert microbatch.padding is None


def test_a_sequence_above_the_context_is_refused_with_both_numbers(make_batch: Any) -> None:
    with pytest.raises(InvalidValueError, match=r"sequence 1 has 30 tokens.*20"):
        make_batch(10, 30).check(300, 20)


@pytest.mark.parametrize("bad", [-1, 300])
@pytest.mark.parametrize("name", ["tokens", "targets"])
def test_a_token_outside_the_vocabulary_is_refused_with_its_place(make_batch: Any, name: str, bad: int) -> None:
    batch = make_batch(10)
    getattr(batch, name)[4] = bad
    with pytest.raises(InvalidValueError, match=rf"{name}\[4\] is {bad}.*0 to 299"):
        batch.check(300, 100)


def pair(prefix: int, chosen: int, rejected: int, seed: int = 0) -> TrainingBatch:
    """Two sequences with `prefix` equal positions of weight 0, then `chosen` and `rejected` of their own."""
    random = np.random.default_rng(seed)
    shared, rest = random.integers(0, 300, (2, prefix)), [random.integers(0, 300, (2, n)) for n in (chosen, rejected)]
    tokens, targets = np.concatenate([part for own in rest for part in (shared, own)], axis=1).astype(np.int32)
    counted = [np.ones(n, np.float32) for n in (chosen, rejected)]
    weights = np.concatenate([part for own in counted for part in (np.zeros(prefix, np.float32), own)])
    return TrainingBatch([prefix + chosen, prefix + rejected], tokens, targets, weights)


def joined(*batches: TrainingBatch) -> TrainingBatch:
    lengths = [length for batch in batches for length in batch.lengths]
    names = ("tokens", "targets", "weights")
    return TrainingBatch(lengths, *(np.concatenate([getattr(batch, name) for batch in batches]) for name in names))


@settings(max_examples=examples(60), deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=5),
    max_tokens=st.integers(1, 60),
)
def test_a_pair_is_one_row_with_its_prefix_once(sizes: list[tuple[int, int, int]], max_tokens: int) -> None:
    batch = joined(*(pair(*size, seed=seed) for seed, size in enumerate(sizes)))
    microbatches = split(batch, max_tokens, CPU, pairs=True)
    where = np.concatenate([microbatch.where.numpy() for microbatch in microbatches])
    assert sorted(where) == list(range(sum(batch.lengths)))
    offsets = np.cumsum([0, *batch.lengths])
    for microbatch in microbatches:
        assert microbatch.branches is not None and microbatch.positions is not None
        flat, where = microbatch.tokens.flatten(), microbatch.where.numpy()
        sequence = microbatch.sequence.numpy()
        assert np.array_equal(flat[microbatch.real].numpy(), batch.tokens[where])
        assert np.array_equal(microbatch.targets.numpy(), batch.targets[where])
        assert np.array_equal(microbatch.weights.numpy(), batch.weights[where])
        assert np.array_equal(microbatch.positions.flatten()[microbatch.real].numpy(), where - offsets[sequence])
        assert {index ^ 1 for index in sequence} == set(sequence)
        padding = 0 if microbatch.padding is None else int(microbatch.padding.sum())
        assert microbatch.num_computed == microbatch.tokens.numel() - padding
    assert sum(m.num_computed for m in microbatches) == sum(sum(size) for size in sizes)


def test_what_counts_or_predicts_otherwise_is_not_shared() -> None:
    batch = pair(6, 2, 2)
    batch.weights[4] = 0.5
    assert split(batch, 100, CPU, pairs=True)[0].branches == (Branch(4, 8),)
    batch.targets[2] += 1
    assert split(batch, 100, CPU, pairs=True)[0].branches == (Branch(2, 8),)
    batch.tokens[8] += 1
    assert split(batch, 100, CPU, pairs=True)[0].branches == (Branch(0, 8),)


def test_a_sequence_without_a_partner_is_refused(make_batch: Any) -> None:
    with pytest.raises(InvalidValueError, match="3 sequences are no pairs"):
        split(make_batch(4, 5, 6), 100, CPU, pairs=True)
