"""Packing: nothing lost, nothing split, no bin too full, few bins."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kt_runtime.train.stages.packing import pack

LENGTHS = st.lists(st.integers(1, 40), max_size=60)


@given(LENGTHS, st.integers(1, 50))
def test_every_example_is_in_one_bin_and_no_bin_is_too_full(lengths: list[int], capacity: int) -> None:
    bins = pack(lengths, capacity)
    assert sorted(index for each in bins for index in each) == list(range(len(lengths)))
    sums = [sum(lengths[index] for index in each) for each in bins]
    assert all(total <= capacity or len(each) == 1 for total, each in zip(sums, bins, strict=True))
    assert all(first + second > capacity for first, second in itertools.combinations(sums, 2))
    assert bins == sorted(sorted(each) for each in bins)


def test_a_perfect_fit_is_found() -> None:
    assert pack([6, 5, 4, 3, 2], 10) == [[0, 2], [1, 3, 4]]


def test_ten_thousand_examples_are_packed_almost_without_gaps() -> None:
    lengths = [17 + 7919 * index % 500 for index in range(10_000)]
    assert len(pack(lengths, 2048)) <= 1.01 * sum(lengths) / 2048
