"""The sizes of `bench swap`, its figures, and the streams that it measures."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kt_runtime.adapters import read_peft_directory
from kt_runtime.bench.page.report import measurement_of, parse_report
from kt_runtime.bench.serve.streams import Stream
from kt_runtime.bench.swap import server_side
from kt_runtime.bench.swap.figures import Swap, growth, result_of, row_of
from kt_runtime.bench.swap.files import write_adapter
from kt_runtime.bench.swap.plan import Plan, Size, bytes_of, rank_bytes, size_of
from kt_runtime.bench.swap.report import print_report
from kt_runtime.bench.swap.streams import LEAST_STOP_SECONDS, NAP_SECONDS, Naps, Streams
from kt_runtime.errors import InvalidValueError, UnknownNameError
from kt_runtime.families import family_for
from kt_runtime.serve.models.presets import load_preset

TINY = load_preset("tiny-qwen3-moe").config


def test_a_size_is_reached_by_the_rank_on_attention_or_on_all_targets() -> None:
    of_bench = load_preset("bench-qwen3-moe").config
    for name, rank, targets in (("10MB", 63, "attention"), ("300MB", 41, "all"), ("3GB", 415, "all")):
        found = size_of(name, of_bench)
        assert (found.rank, found.targets) == (rank, targets)
        assert found.num_bytes == pytest.approx(bytes_of(name), rel=0.02)
    assert size_of("1KB", TINY).rank == 1


@pytest.mark.parametrize("targets", ["attention", "all"])
def test_a_written_adapter_has_the_bytes_of_its_size(tmp_path: Path, targets: str) -> None:
    size = Size("test", 4 * rank_bytes(TINY, targets), 4, targets)
    found, other = (
        read_peft_directory(write_adapter(tmp_path / str(seed), size, TINY, seed), family_for(TINY), TINY, 4)
        for seed in range(2)
    )
    assert found.num_bytes == size.num_bytes and found.rank == 4
    pairs = zip(found.modules.values(), other.modules.values(), strict=True)
    assert all(not bool((one.a == another.a).all()) for one, another in pairs)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sizes": ("10",)}, "--size '10': must be a number above 0 with a unit of KB, MB, GB, as 10MB"),
        ({"sizes": ("0MB",)}, "--size '0MB'"),
        ({"ranks": (0,)}, "--rank is 0"),
        ({"cycles": -1}, "--cycles is -1"),
        ({"streams": 0}, "--streams is 0"),
        ({"control_seconds": 0.0}, "--control-seconds is 0.0: must be above 0, at most 3600"),
        ({"control_seconds": float("nan")}, "--control-seconds is nan"),
    ],
)
def test_a_senseless_size_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        Plan(**fields)


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="int8"):
        Plan(dtype="int8")


def swap(what: str, size: str | None, quiet: list[float], *during: list[float]) -> Swap:
    return Swap(what, size, 8, "all", 10**7, 8, quiet, list(during), [40.0, 50.0, 90.0], [60.0], [5.0] if size else [])


def test_a_stall_is_what_the_longest_gap_exceeds_a_decode_step_by() -> None:
    row = row_of(swap("load", "10MB", [20.0, 22.0, 30.0], [21.0, 30.0], [47.0, 19.0], [33.0]))
    assert (row["decode_step_ms"], row["longest_gap_ms"], row["stall_ms"], row["quiet_stall_ms"]) == (22, 47, 25, 8)
    assert row["median_stall_ms"] == 11
    assert (row["publish_ms"], row["first_token_ms"], row["unload_ms"], row["rounds"]) == (50.0, 60.0, 5.0, 3)
    assert row_of(swap("session", None, [20.0], [19.0]))["stall_ms"] == 0.0
    assert row_of(swap("session", None, [20.0], [19.0]))["unload_ms"] is None


def test_a_control_is_judged_as_the_rounds_are() -> None:
    found = swap("load", "10MB", [20.0, 22.0, 30.0], [47.0])
    found.control = [[23.0, 20.0], [50.0], [29.0, 19.0]]
    row = row_of(found)
    assert (row["stall_ms"], row["control_stall_ms"], row["control_median_stall_ms"]) == (25, 28, 7)
    assert row_of(swap("session", None, [20.0], [19.0]))["control_stall_ms"] is None


def test_a_round_has_a_stall_in_each_of_its_phases() -> None:
    found = swap("load", "10MB", [20.0, 22.0, 30.0], [47.0])
    found.phases = {"publishing": [[23.0, 20.0], [26.0], []], "first_token": [[50.0], [30.0], [20.0]]}
    row = row_of(found)
    assert (row["publishing_stall_ms"], row["publishing_median_stall_ms"]) == (4, 2.5)
    assert (row["first_token_stall_ms"], row["first_token_median_stall_ms"]) == (28, 8)
    assert row["unloading_stall_ms"] is row["unloading_median_stall_ms"] is row["storing_stall_ms"] is None


def test_stolen_time_is_the_mean_of_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_side.psutil, "cpu_count", lambda: 4)
    monkeypatch.setattr(server_side.psutil, "cpu_times", lambda: SimpleNamespace(steal=2.0))
    assert server_side.stolen_ms() == 500.0
    monkeypatch.setattr(server_side.psutil, "cpu_times", lambda: SimpleNamespace(user=2.0))
    assert server_side.stolen_ms() is None


def test_the_result_names_the_row_that_is_the_furthest_above_its_bar() -> None:
    rows = [
        row_of(swap("load", "10MB", [20.0], [45.0])),  # 5 ms more than a step
        row_of(swap("swap", "10MB", [100.0], [150.0])),  # less than a step
        row_of(swap("load", "300MB", [20.0], [25.0], [25.0], [44.0])),  # 4 ms more in one round
        row_of(swap("control", None, [20.0], [90.0])),
    ]
    found = result_of(rows, [100, 300, 150, 250], 2)
    assert (found["longest_stall_ms"], found["decode_step_ms"], found["streams_failed"]) == (25.0, 20.0, 2)
    assert found["median_stall_ms"] == 25.0
    assert found["publish_ms"] == {"10MB": 50.0, "300MB": 50.0}


def test_memory_grows_from_the_largest_of_the_first_cycles() -> None:
    assert growth([]) is None and growth([7]) == 0
    assert growth([10] * 99 + [50] + [20] * 899 + [60]) == 10
    assert growth([10, 50] + [20] * 18) == -30


def test_gaps_are_those_of_single_requests_that_overlap_the_time() -> None:
    streams = Streams("http://unused", 1, 8, 700)
    streams._requests = [Stream([(1.0, 1), (1.5, 2), (3.0, 4)]), Stream([(9.0, 1), (9.1, 2)])]
    assert streams.gaps_ms(2.0, 9.0) == pytest.approx([1500.0, 100.0], rel=3e-14)  # 3.6e-15
    assert streams.gaps_ms(0.0, 0.5) == []
    assert streams.ended_gaps_ms(1.0, 1.5) + streams.ended_gaps_ms(1.5, 3.0) == streams.gaps_ms(1.0, 3.0)
    assert streams.ended_gaps_ms(2.0, 9.0) == pytest.approx([1500.0], rel=3e-14)
    streams._loop.close()


def test_a_thread_that_sleeps_notices_that_the_machine_stopped() -> None:
    times = iter([10.0, 10.005, 10.417, 10.422])
    naps = Naps(clock=lambda: next(times))
    processor = min(os.sched_getaffinity(0))
    naps._ends = SimpleNamespace(  # type: ignore[assignment]
        wait=lambda seconds: seconds != NAP_SECONDS or len(naps._woke.get(processor, ())) == 3
    )
    before = os.sched_getaffinity(0)
    naps._run(processor)
    os.sched_setaffinity(0, before)
    assert naps.latest_ms(9.0, 11.0) == naps.latest_ms(10.1, 10.2) == pytest.approx(407.0, abs=5e-12)  # 9.7e-13
    assert naps.latest_ms(10.0, 10.004) == 0.0
    assert naps.latest_ms(10.418, 11.0) == pytest.approx(0.0, abs=5e-12)  # 7.9e-13


def test_the_stops_of_one_processor_within_a_gap_are_counted_and_short_ones_are_not() -> None:
    naps = Naps()
    least = LEAST_STOP_SECONDS
    for processor, woke, late in ((0, 1.1, 0.1), (0, 1.2, 0.9 * least), (0, 2.0, 0.3), (1, 2.1, 0.25)):
        naps._note(processor, woke, late)
    assert naps.stopped_ms(0.0, 3.0) == pytest.approx(400.0, rel=8e-15)  # 8.5e-16, as the next ones
    assert naps.stopped_ms(1.05, 1.3) == pytest.approx(50.0, rel=8e-15)
    assert naps.stopped_ms(1.9, 2.1) == pytest.approx(200.0, rel=8e-15)
    assert naps.stopped_ms(1.15, 1.6) == 0.0


def test_every_processor_has_a_thread_that_sleeps() -> None:
    with Naps() as naps:
        processors = os.sched_getaffinity(0)
        deadline = time.monotonic() + 60.0
        while naps._woke.keys() != processors or not all(naps._woke.values()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert os.sched_getaffinity(0) == processors


def test_a_report_becomes_a_measurement_and_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row_of(swap("session", None, [20.0], [45.0])), row_of(swap("load", "10MB", [20.0], [45.0]))]
    report: dict[str, Any] = {"machine": {"cpu": "a CPU", "processors": 2, "kt_runtime": "0"}}
    report |= {"swap": Plan().facts() | {"dtype": "bfloat16"}} | result_of(rows, [1 << 20, 3 << 20], 0)
    origin = {"title": "t", "date": "2026-11-24", "machine": "m", "hardware": "h", "command": "c", "commit": "abc"}
    made = measurement_of(parse_report(json.dumps(report).encode(), "report"), **origin)
    found = {single.what: str(single.value) for single in made.figures}
    assert made.kind == "swap" and found["memory that grew after the first hundred of them"] == "2"
    assert len(made.tables[0].rows) == 2
    print_report(report)
    shown = capsys.readouterr().out
    assert "Longest stall 25 ms, 25 in the median of rounds; one decode step and 10 ms are 30 ms" in shown
    assert "2.0 MiB" in shown
