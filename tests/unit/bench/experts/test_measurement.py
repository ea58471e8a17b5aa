from __future__ import annotations

import time

import pytest

from kt_runtime.bench.experts.measurement import Patience, measure


def test_calls_take_turns_and_the_first_is_not_counted() -> None:
    seen: list[str] = []
    timing = measure([lambda: seen.append("a"), lambda: seen.append("b")], Patience(runs=4, seconds=1e-3))
    assert seen[:3] == ["a", "b", "a"] and len(seen) >= 2
    assert timing.runs == len(seen) - 1
    assert 0 < timing.ms <= timing.ms_median


def test_a_call_that_is_too_long_is_made_no_more_often_than_patience_allows() -> None:
    seen: list[int] = []

    def slow() -> None:
        seen.append(1)
        time.sleep(0.03)

    timing = measure([slow], Patience(runs=100, seconds=0.01))
    assert timing.runs == len(seen) <= 3 and timing.ms >= 30


@pytest.mark.parametrize("runs", [1, 7])
def test_at_least_the_wanted_runs_are_made(runs: int) -> None:
    assert measure([lambda: None], Patience(runs, 0.001)).runs >= runs
