"""`kt-runtime bench interfere` on a tiny model and a real server."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from kt_runtime.bench.page.measurement import Measurement

BenchOutput = Callable[..., tuple[str, str]]
Recorded = Callable[[dict[str, Any]], Measurement]
SIZES = (
    "--load",
    "0.5",
    "--seconds",
    "2",
    "--alone-seconds",
    "1",
    "--alone-rounds",
    "1",
    "--burst",
    "8",
    "--sequences",
    "2",
    "--tokens",
    "32",
)


@pytest.fixture(scope="module")
def result(bench_output: BenchOutput) -> dict[str, Any]:
    out, _ = bench_output("interfere", "--model", "tiny-qwen3-moe", *SIZES, "--dtype", "float32", "--json")
    made: dict[str, Any] = json.loads(out)
    return made


def test_half_load_is_measured_in_every_mode(result: dict[str, Any], recorded: Recorded) -> None:
    rows = {row["mode"]: row for row in result["rows"]}
    assert list(rows) == ["idle", "training", "whole_calls"] and len(result["rows"]) == 3
    assert len({(row["load"], row["requests"], row["requests_per_s"]) for row in result["rows"]}) == 1
    for row in result["rows"]:
        assert 0 < row["tpot_ms"]["p50"] <= row["tpot_ms"]["p95"] <= row["tpot_ms"]["p99"]
        assert row["ttft_ms"]["p50"] > 0 and 0 < row["busy_share"] <= 1 and 0 <= row["met_share"] <= 1
    assert result["tpot_target_ms"] > 0 and result["capacity_requests_per_s"] > 0
    for name in ("p99_tpot_ratio", "training_alone_share", "goodput_ratio"):
        assert result[name] >= 0
    assert recorded(result).kind == "interfere"
