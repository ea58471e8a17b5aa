"""Batches: every row once per epoch, an order that any step can be planned from, one wire sequence per example."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kt_runtime.train.examples import Example, Pair
from kt_runtime.train.recipe import Recipe
from kt_runtime.train.run import schedule
from kt_runtime.train.stages import batches


def recipe(**keys: Any) -> Recipe:
    values = {"model_name_or_path": "m", "dataset": ("d",), "output_dir": Path("o"), "cutoff_len": 16}
    return Recipe(**{"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, **values, **keys})


def example(length: int, first: int = 0) -> Example:
    return Example.of(range(first, first + length + 1), [False, False, *[True] * (length - 1)])


EXAMPLES = [example(length, 100 * length) for length in (2, 3, 4, 5, 6, 7, 8)]


def firsts(steps: list[list[list[Any]]]) -> list[list[list[int]]]:
    return [[[int(item.tokens[0]) for item in micro] for micro in step] for step in steps]


def test_every_example_comes_once_per_epoch() -> None:
    steps = list(batches.plan(EXAMPLES, recipe(), 4))
    assert [[len(micro) for micro in step] for step in steps] == [[2, 2], [2, 1], [2, 2], [2, 1]]
    for epoch in (steps[:2], steps[2:]):
        assert sorted(item.num_tokens for step in epoch for micro in step for item in micro) == [2, 3, 4, 5, 6, 7, 8]
    assert firsts(steps[:2]) != firsts(steps[2:])


@given(st.integers(0, 9), st.booleans())
def test_a_run_resumes_at_any_step(first_step: int, packing: bool) -> None:
    settings = recipe(packing=packing)
    whole = list(batches.plan(EXAMPLES, settings, 9))
    assert firsts(list(batches.plan(EXAMPLES, settings, 9, first_step))) == firsts(whole[first_step:])


def test_the_order_depends_on_the_data_seed_and_else_on_the_seed() -> None:
    def order(**keys: Any) -> list[list[list[int]]]:
        return firsts(list(batches.plan(EXAMPLES, recipe(**keys), 2)))

    assert order(seed=1) == order(seed=1) == order(seed=2, data_seed=1)
    assert order(seed=1) != order(seed=2)
    assert order(seed=1, disable_shuffling=True) == [[[200, 300], [400, 500]], [[600, 700], [800]]]


def test_a_packed_micro_batch_holds_the_examples_of_its_bins() -> None:
    settings = recipe(packing=True, per_device_train_batch_size=1, gradient_accumulation_steps=1)
    assert batches.num_sequences(EXAMPLES, settings) == batches.steps_per_epoch(EXAMPLES, settings) == 3
    steps = list(batches.plan(EXAMPLES, settings, 3))
    packed = [sum(item.num_tokens for item in micro) for step in steps for micro in step]
    assert len(packed) == 3 and sum(packed) == 35 and max(packed) <= 16
    (micro,) = max(steps, key=lambda step: len(step[0]))
    assert batches.to_batch(micro, 1.0).lengths == [item.num_tokens for item in micro]


def test_pairs_are_not_packed() -> None:
    pairs = [Pair(example(3), example(4))] * 5
    assert batches.num_sequences(pairs, recipe(packing=True)) == 5


@pytest.mark.parametrize(("count", "keys", "steps"), [(7, {}, 2), (8, {}, 2), (9, {}, 3), (1, {"packing": True}, 1)])
def test_steps_are_counted_as_hugging_face_does(count: int, keys: dict[str, Any], steps: int) -> None:
    examples = [EXAMPLES[0]] * count
    assert batches.steps_per_epoch(examples, recipe(**keys)) == steps
    total = schedule.num_steps(recipe(num_train_epochs=1.5, **keys), batches.num_sequences(examples, recipe(**keys)))
    assert total == -(-steps * 3 // 2)


@given(st.lists(st.integers(2, 9), min_size=1, max_size=6))
def test_a_batch_holds_every_token_with_its_weight(lengths: Sequence[int]) -> None:
    items = [example(length, 50 * length) for length in lengths]
    batch = batches.to_batch(items, 0.25)
    assert batch.lengths == list(lengths)
    np.testing.assert_array_equal(batch.tokens, np.concatenate([item.tokens for item in items]))
    np.testing.assert_array_equal(batch.targets, np.concatenate([item.targets for item in items]))
    np.testing.assert_array_equal(batch.weights, np.concatenate([item.trained * np.float32(0.25) for item in items]))


def test_a_pair_travels_as_chosen_then_rejected_with_ones_where_it_counts() -> None:
    pairs = [Pair(example(3, 10), example(4, 20)), Pair(example(5, 30), example(2, 40))]
    batch = batches.to_batch(pairs, 0.125)
    assert batch.lengths == [3, 4, 5, 2]
    assert [int(part[0]) for part in np.split(batch.tokens, [3, 7, 12])] == [10, 20, 30, 40]
    assert batch.weights.tolist() == [0, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 1, 0, 1]


# Packing: nothing lost, nothing split, no bin too full, few bins.

LENGTHS = st.lists(st.integers(1, 40), max_size=60)


@given(LENGTHS, st.integers(1, 50))
def test_every_example_is_in_one_bin_and_no_bin_is_too_full(lengths: list[int], capacity: int) -> None:
    bins = batches.pack(lengths, capacity)
    assert sorted(index for each in bins for index in each) == list(range(len(lengths)))
    sums = [sum(lengths[index] for index in each) for each in bins]
    assert all(total <= capacity or len(each) == 1 for total, each in zip(sums, bins, strict=True))
    assert all(first + second > capacity for first, second in itertools.combinations(sums, 2))
    assert bins == sorted(sorted(each) for each in bins)


def test_a_perfect_fit_is_found() -> None:
    assert batches.pack([6, 5, 4, 3, 2], 10) == [[0, 2], [1, 3, 4]]


def test_ten_thousand_examples_are_packed_almost_without_gaps() -> None:
    lengths = [17 + 7919 * index % 500 for index in range(10_000)]
    assert len(batches.pack(lengths, 2048)) <= 1.01 * sum(lengths) / 2048
