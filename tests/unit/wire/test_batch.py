from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kt_runtime.errors import InvalidValueError
from kt_runtime.wire import Batch


def test_sequences_are_laid_out_one_after_the_other() -> None:
    batch = Batch.from_sequences([[1, 2, 3], [4]], [[2, 3, 4], [5]], [[0, 1, 1], [0.5]])
    assert batch.lengths == [3, 1]
    assert batch.num_tokens == 4
    np.testing.assert_array_equal(batch.tokens, [1, 2, 3, 4])
    np.testing.assert_array_equal(batch.targets, [2, 3, 4, 5])
    np.testing.assert_array_equal(batch.weights, [0, 1, 1, 0.5])
    assert (batch.tokens.dtype, batch.targets.dtype, batch.weights.dtype) == (np.int32, np.int32, np.float32)


def test_without_weights_every_target_counts_once() -> None:
    np.testing.assert_array_equal(Batch.from_sequences([[1, 2]], [[2, 3]]).weights, [1, 1])


def test_split_gives_one_array_per_sequence() -> None:
    batch = Batch.from_sequences([[1, 2, 3], [4], [5, 6]], [[1, 2, 3], [4], [5, 6]])
    parts = batch.split(np.arange(6, dtype=np.float32))
    assert [list(part) for part in parts] == [[0, 1, 2], [3], [4, 5]]


@pytest.mark.parametrize(
    "tokens, targets, weights, reason",
    [
        ([], [], None, "one or more"),
        ([[1], []], [[1], []], None, "each at least 1"),
        ([[1, 2]], [[1]], None, r"targets have lengths \[1\], the tokens have \[2\]"),
        ([[1, 2]], [[1, 2]], [[1.0]], "weights have lengths"),
        ([[-1]], [[1]], None, r"tokens\[0\] is -1; allowed are 0 to 2147483647"),
        ([[1]], [[2**31]], None, r"targets\[0\] is 2147483648"),
        ([[1.5]], [[1]], None, "whole numbers"),
        ([["a"]], [[1]], None, "whole numbers"),
        ([[1, 1]], [[1, 1]], [[1.0, float("nan")]], r"weights\[1\] is nan"),
        ([[1]], [[1]], [[float("inf")]], "finite"),
        ([[1]], [[1]], [[1e39]], "finite float32"),
        ([[1]], [[1]], [["1"]], "must be numbers"),
    ],
)
def test_a_batch_that_makes_no_sense_is_refused(tokens: Any, targets: Any, weights: Any, reason: str) -> None:
    with pytest.raises(InvalidValueError, match=reason):
        Batch.from_sequences(tokens, targets, weights)


def test_arrays_of_another_shape_are_refused() -> None:
    with pytest.raises(InvalidValueError, match=r"tokens have shape \[1, 2\], the lengths add up to 2"):
        Batch(np.zeros((1, 2), np.int32), np.zeros(2, np.int32), np.zeros(2, np.float32), [2])
