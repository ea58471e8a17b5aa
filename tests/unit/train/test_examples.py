"""Examples: one array behind tokens and targets, masks of one length with them."""

from __future__ import annotations

import numpy as np
import pytest

from kt_runtime.train.examples import Example, Pair


def test_an_example_holds_its_sequence_once() -> None:
    example = Example.of([5, 6, 7, 8], [False, False, True, True], "d:1")
    assert example.tokens.tolist() == [5, 6, 7]
    assert example.targets.tolist() == [6, 7, 8]
    assert example.trained.tolist() == [False, True, True]
    assert example.ids.tolist() == [5, 6, 7, 8]
    assert (example.num_tokens, example.num_trained) == (3, 2)
    assert np.shares_memory(example.tokens, example.targets)
    assert example.tokens.dtype == np.int32 and example.trained.dtype == np.bool_


def test_a_pair_counts_both_answers() -> None:
    pair = Pair(Example.of([1, 2, 3], [False, True, True]), Example.of([1, 4], [False, True]))
    assert (pair.num_tokens, pair.num_trained) == (3, 3)
    assert pair.examples == (pair.chosen, pair.rejected)


def test_arrays_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[2\], \[2\], \[1\]"):
        Example(np.array([1, 2]), np.array([2, 3]), np.array([True]))
