"""What is known of the reference's log-probabilities, and what a checkpoint gives back of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kt_runtime.errors import InvalidValueError
from kt_runtime.train.examples import Pair
from kt_runtime.train.stages.reference_values import ReferenceValues


def swapped(pairs: list[Pair]) -> list[Pair]:
    """Other pairs than `pairs`, made anew at each call, as a resumed run reads its data anew."""
    return [Pair(pair.rejected, pair.chosen) for pair in pairs]


def test_values_are_found_by_pair_and_missing_ones_named_once_in_order(pairs: list[Pair]) -> None:
    values, others = ReferenceValues(pairs), swapped(pairs)
    values.put([pairs[2], others[1]], np.array([[1, 2], [3, 4]], np.float32))
    assert values.of([others[1], pairs[2]]).tolist() == [[3, 4], [1, 2]]
    coming = [pairs[3], others[0], pairs[2], pairs[3], others[1], pairs[0]]
    assert values.missing(coming) == [pairs[3], others[0], pairs[0]]


@pytest.mark.parametrize("with_evaluation", [True, False])
def test_a_checkpoint_keeps_the_runs_pairs_by_place_and_the_others_by_content(
    pairs: list[Pair], with_evaluation: bool
) -> None:
    values, others = ReferenceValues(pairs), swapped(pairs)
    values.put([*pairs[:2], *others[:2]], np.array([[1, 2], [3, 4], [5, 6], [7, 8]], np.float32))
    saved = values.state(evaluation=with_evaluation)
    resumed, again = ReferenceValues(list(pairs)), swapped(pairs)
    resumed.restore(saved)
    assert resumed.of(pairs[:2]).tolist() == [[1, 2], [3, 4]] and resumed.missing(pairs) == pairs[2:]
    if with_evaluation:
        assert resumed.of([again[1], again[0]]).tolist() == [[7, 8], [5, 6]] and resumed.missing(again) == again[2:]
    else:
        assert resumed.missing(again) == again
    assert ("evaluation_reference" in saved) == with_evaluation


def test_a_checkpoint_of_other_pairs_is_refused(pairs: list[Pair]) -> None:
    saved: dict[str, Any] = ReferenceValues(pairs[:3]).state(evaluation=True)
    with pytest.raises(InvalidValueError, match=r"float32 \[3, 2\]; this run needs float32 \[6, 2\]"):
        ReferenceValues(pairs).restore(saved)
