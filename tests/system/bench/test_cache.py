"""`kt-runtime bench cache` on a tiny model: files, then a real server that is started twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest

from kt_runtime.bench.cache.plan import SOURCES
from kt_runtime.bench.cache.report import print_report
from kt_runtime.bench.page.measurement import Measurement
from kt_runtime.bench.page.report import measurement_of, parse_report

BenchOutput = Callable[..., tuple[str, str]]
Recorded = Callable[[dict[str, Any]], Measurement]

QUICK = ("--model", "tiny-qwen3-moe", "--tokens", "256", "--page-tokens", "16", "--rounds", "2")


@pytest.fixture(scope="module")
def result(bench_output: BenchOutput) -> dict[str, Any]:
    out, _ = bench_output("cache", *QUICK, "--dtype", "float32", "--bandwidth-bytes", "4000000", "--json")
    made: dict[str, Any] = json.loads(out)
    return made


def test_each_tier_served_prompts_of_its_own(result: dict[str, Any]) -> None:
    """The command checks who served what; a sample that another tier served ends it."""
    assert tuple(result["ttft_ms"]) == SOURCES
    for source in SOURCES:
        samples = result["ttft_ms_samples"][source]
        assert len(samples) == 2 and min(samples) > 0
        assert result["ttft_ms"][source] == median(samples)
        assert result["ttft_ms_min"][source] == min(samples)
    assert result["cold_to_disk"] == result["ttft_ms"]["cold"] / result["ttft_ms"]["disk"]
    assert result["different_answers"] == 0


def test_the_disk_tier_is_held_against_plain_files(result: dict[str, Any]) -> None:
    """One page: 16 tokens, 3 layers, 2 heads of 32 numbers for K and for V, 4 bytes each."""
    rates = result["files"]["bytes_per_s"]
    assert result["files"]["page_bytes"] == 16 * 3 * 2 * 32 * 2 * 4
    # Seconds were divided, not rates: 1.4e-16 measured.
    assert result["disk_read_ratio"] == pytest.approx(rates["tier_read"] / rates["plain_read"], rel=1e-15, abs=0)
    assert result["disk_write_ratio"] == pytest.approx(rates["tier_write"] / rates["plain_write"], rel=1e-15, abs=0)


def test_people_get_tables(result: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    print_report(result)
    printed = capsys.readouterr().out
    assert "disk after restart" in printed and f"{result['disk_read_ratio']:.2f}" in printed
    print_report(result | {"ttft_ms": None})
    assert "disk after restart" not in capsys.readouterr().out


def test_a_report_becomes_a_measurement(result: dict[str, Any], recorded: Recorded) -> None:
    made = recorded(result)
    assert [row.case[0].replace(" ", "_") for row in made.tables[0].rows] == list(SOURCES)
    for row, source in zip(made.tables[0].rows, SOURCES, strict=True):
        assert float(str(row.figures[0])) == pytest.approx(result["ttft_ms"][source], rel=1e-3)
    assert recorded_without_server(result, made).tables == []


def recorded_without_server(result: dict[str, Any], made: Measurement) -> Measurement:
    """The report of `--no-server`: without first tokens."""
    report = parse_report(json.dumps(result | {"ttft_ms": None}).encode(), "report.json")
    origin = {name: getattr(made, name) for name in ("title", "date", "machine", "hardware", "command", "commit")}
    return measurement_of(report, **origin)
