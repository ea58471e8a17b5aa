"""`kt-runtime bench swap` on a tiny model and a real server."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from kt_runtime.bench.page.measurement import Measurement

BenchOutput = Callable[..., tuple[str, str]]
Recorded = Callable[[dict[str, Any]], Measurement]
SIZES = ("--size", "40KB", "--size", "1MB", "--rank", "4", "--rounds", "1", "--cycles", "3")
STREAMS = ("--streams", "2", "--many-streams", "4", "--swaps", "2", "--control-seconds", "0.3")


def test_sessions_files_and_cycles_are_measured_and_no_stream_fails(
    bench_output: BenchOutput, recorded: Recorded
) -> None:
    out, _ = bench_output("swap", "--model", "tiny-qwen3-moe", *SIZES, *STREAMS, "--dtype", "float32", "--json")
    result: dict[str, Any] = json.loads(out)
    assert (result["streams_failed"], result["failures"]) == (0, [])
    control, *rows = result["rows"]
    assert (control["what"], control["publish_ms"], control["rounds"]) == ("control", None, 10)
    assert [(row["what"], row["targets"]) for row in rows[:2]] == [("session", "attention"), ("session", "all")]
    assert [(row["what"], row["size"], row["streams"]) for row in rows[2:]] == [
        ("load", "40KB", 2),
        ("load", "1MB", 2),
        ("swap", "40KB", 4),
    ]
    for row in rows:
        assert row["publish_ms"] > 0 and row["decode_step_ms"] > 0 and row["longest_gap_ms"] > 0
        assert row["stall_ms"] >= row["median_stall_ms"] >= 0
        assert row["stolen_ms"] is None or row["stolen_ms"] >= 0
        assert row["stopped_ms"] > 0 and (row["control_stopped_ms"] is not None) == (row["what"] == "load")
        assert (row["control_median_stall_ms"] is not None) == (row["what"] == "load")
        phases = [row[f"{name}_stall_ms"] for name in ("publishing", "first_token", "unloading", "storing")]
        known = [each for each in phases if each is not None]  # a phase can be shorter than a step
        assert max(known) <= row["stall_ms"] if row["what"] == "load" else phases == [None] * 4
    assert list(result["publish_ms"]) == ["40KB", "1MB"]
    assert result["longest_stall_ms"] in [row["stall_ms"] for row in rows] and result["rss_growth_bytes"] is not None
    assert recorded(result).kind == "swap"
