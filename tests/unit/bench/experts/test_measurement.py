from __future__ import annotations

from typing import Any

import pytest

from kt_runtime.bench.experts import measurement
from kt_runtime.bench.experts.limits import Limits, last_level_cache_bytes, training_work
from kt_runtime.bench.experts.measurement import Instruments, Patience, Row, Timing, measure

PASSES_S = 1e-5
"""Between two looks at the clock: what a call that does nothing takes."""


def same(expected: Any) -> Any:
    """Equal but for the rounding of a few float64 operations: 9e-16 was measured."""
    return pytest.approx(expected, rel=5e-15, abs=0)


class PlayedClock:
    """In place of the module `time`: what a busy machine takes from a call would be counted as the call's."""

    def __init__(self) -> None:
        self._now_s = 100.0

    def perf_counter(self) -> float:
        self._now_s += PASSES_S
        return self._now_s

    def sleep(self, seconds: float) -> None:
        self._now_s += seconds


@pytest.fixture(autouse=True)
def time(monkeypatch: pytest.MonkeyPatch) -> PlayedClock:
    clock = PlayedClock()
    monkeypatch.setattr(measurement, "time", clock)
    return clock


def test_calls_take_turns_and_the_first_is_not_counted() -> None:
    seen: list[str] = []
    timing = measure([lambda: seen.append("a"), lambda: seen.append("b")], Patience(runs=4, seconds=1e-3))
    assert seen[:3] == ["a", "b", "a"] and len(seen) >= 2
    assert timing.runs == len(seen) - 1
    assert 0 < timing.ms <= timing.ms_median


def test_a_call_that_is_too_long_is_made_no_more_often_than_patience_allows(time: PlayedClock) -> None:
    seen: list[int] = []

    def slow() -> None:
        seen.append(1)
        time.sleep(0.03)

    timing = measure([slow], Patience(runs=100, seconds=0.01))
    assert timing.runs == len(seen) == 2 and timing.ms >= 30


@pytest.mark.parametrize("runs", [1, 7])
def test_at_least_the_wanted_runs_are_made(runs: int) -> None:
    assert measure([lambda: None], Patience(runs, 0.001)).runs >= runs


def test_memory_is_read_before_and_after_each_call() -> None:
    seen: list[str] = []

    def read() -> float:
        seen.append("read")
        return float(len(seen))

    timing = measure([lambda: seen.append("call")], Patience(runs=3, seconds=1e-3), Instruments(read))
    assert seen == ["read", "call"] * (timing.runs + 1) + ["read"]
    assert len(timing.seconds) == timing.runs and timing.ms == same(1e3 * min(timing.seconds))
    assert timing.read_rates == tuple(float(2 * i + 3) for i in range(timing.runs + 1))  # without the first


def test_reads_around_a_long_first_call_count_as_it_does(time: PlayedClock) -> None:
    rates = iter([1.0, 2.0])
    timing = measure([lambda: time.sleep(0.06)], Patience(runs=1, seconds=0.01), Instruments(lambda: next(rates)))
    assert timing.runs == 1 and timing.read_rates == (1.0, 2.0)


def test_an_untimed_call_precedes_each_timed_one_and_the_engines_own_time_counts() -> None:
    seen: list[str] = []

    def inside() -> float:
        seen.append("inside")
        return 0.25

    calls = [lambda name=name: seen.append(name) for name in "abc"]
    timing = measure(calls, Patience(runs=2, seconds=1e-3), Instruments(lambda: 1.0, inside, warms_code=True))
    assert seen[:11] == ["inside", "a", "inside", "b", "inside", "c", "inside", "a", "inside", "b", "inside"]
    assert set(timing.seconds) == {0.25} and timing.ms < 250


def test_a_calls_share_of_the_bandwidth_is_of_the_reads_around_it() -> None:
    timing = Timing(1e3, 2e3, 3, (1.0, 2.0, 4.0), (10.0, 10.0, 5.0, 20.0))
    assert timing.dram_shares(8.0) == same([0.8, 8 * (1 / 10 + 1 / 5) / 2 / 2, 8 * (1 / 5 + 1 / 20) / 2 / 4])
    assert Timing(1e3, 2e3, 1, (1.0,)).dram_shares(8.0) == []


LIMITS = Limits("x", 1, dram_bytes_per_s=100.0, bf16_flops=100.0, int8_ops=100.0)


def row_of(timing: Timing, operations: float, reuse_bytes: int = 0) -> Row:
    work = training_work(4.0, operations, "bf16", recomputed=False)  # 8 bytes, twice the operations
    return Row(
        shape="s",
        experts=1,
        format="f",
        weight_format="w",
        isa="x",
        threads=1,
        tokens=1,
        op="forward",
        timing=timing,
        work=work,
        touched_experts=1,
        rel_error=0.0,
        reuse_bytes=reuse_bytes,
        resident_bytes=1,
        weight_bytes=1,
    )


def test_a_row_bound_by_memory_is_held_against_its_own_reads() -> None:
    row = row_of(Timing(1e3, 2e3, 2, (1.0, 2.0), (10.0, 10.0, 10.0)), 1.0).as_json(LIMITS)
    assert (row["limit"], row["dram_bytes_per_s"]) == ("dram", 10.0)
    assert row["dram_share"] == row["limit_ratio"] == same(0.6)
    assert (row["dram_share_least"], row["dram_share_most"]) == same((0.4, 0.8))
    unread = row_of(Timing(1e3, 2e3, 2, (1.0, 2.0)), 1.0).as_json(LIMITS)
    assert unread["limit_ratio"] == same(0.08) and unread["dram_share"] is None


def test_a_row_bound_by_arithmetic_is_held_against_the_runs_peak() -> None:
    row = row_of(Timing(1e3, 2e3, 2, (1.0, 2.0), (10.0, 10.0, 10.0)), 45.0).as_json(LIMITS)
    assert row["limit"] == "bf16" and row["limit_ratio"] == same(0.9)
    assert row["dram_share"] == same(0.6)


def test_a_row_whose_weights_stay_in_the_cache_says_so() -> None:
    timing = Timing(1e3, 1e3, 1, (1.0,), (10.0, 10.0))
    cache = last_level_cache_bytes()
    assert row_of(timing, 1.0, cache).as_json(LIMITS)["in_cache"]
    assert not row_of(timing, 1.0, cache + 1).as_json(LIMITS)["in_cache"]
