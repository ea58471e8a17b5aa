"""`kt-runtime bench scale` on ranks of a tiny model. docs/scale.md has what replicas took."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pytest

from kt_runtime.bench.page.measurement import Measurement
from kt_runtime.wire.replies import STEP_RUNNING

BenchOutput = Callable[..., tuple[str, str]]
Recorded = Callable[[dict[str, Any]], Measurement]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores")
def test_ranks_decode_the_tokens_of_one_process(bench_output: BenchOutput, recorded: Recorded) -> None:
    options = ("--rank-model", "tiny-qwen3-moe", "--rank-streams", "1", "--rank-runs", "1", "--dtype", "float32")
    out, _ = bench_output("scale", "--replicas", "0", "--ranks", "2", *options, "--json")
    found: dict[str, Any] = json.loads(out)["ranks"]
    assert found["steps"] == {"one process": STEP_RUNNING, "ranks": STEP_RUNNING}
    assert [each["rank"] for each in found["processes"]] == [0, 1]
    (row,) = found["rows"]
    assert row["same_tokens"] == 1.0 and row["tokens_per_s"] > 0 and row["one_process_tokens_per_s"] > 0
    memory = json.loads(out)["ranks"]["memory"]
    assert [each["rank"] for each in memory["rows"]] == [0, 1]
    for each in memory["rows"]:
        assert 0 < each["weight_bytes"] < memory["base_bytes"] < each["at_peak"]
        assert each["loaded"] < each["at_peak"] and each["between_calls"] <= each["at_peak"]
    assert recorded(json.loads(out)).kind == "scale"
