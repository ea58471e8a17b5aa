"""`kt-runtime bench rl` on a tiny model and a real server."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from kt_runtime.bench.page.measurement import Measurement

BenchOutput = Callable[..., tuple[str, str]]
Recorded = Callable[[dict[str, Any]], Measurement]
SIZES = ("--prompts", "2", "--generations", "4", "--prompt-tokens", "70", "--new-tokens", "8", "--steps", "2")


@pytest.fixture(scope="module")
def result(bench_output: BenchOutput) -> dict[str, Any]:
    out, _ = bench_output("rl", "--model", "tiny-qwen3-moe", *SIZES, "--rounds", "2", "--dtype", "float32", "--json")
    made: dict[str, Any] = json.loads(out)
    return made


def test_a_step_is_divided_into_its_parts(result: dict[str, Any]) -> None:
    assert list(result["share"]) == ["rollout", "forward_backward", "optimizer", "publish", "other"]
    assert sum(result["share"].values()) == pytest.approx(1, abs=1e-15) and min(result["share"].values()) >= 0
    assert len(result["runs"]["step_s"]) == len(result["runs"]["group_speedup"]) == 2
    assert min(result["step_s"], result["publish_to_first_token_ms"], result["group_speedup"]) > 0


def test_sampling_and_training_agree_to_the_bit(result: dict[str, Any]) -> None:
    assert result["largest_k3"] == 0


def test_a_report_becomes_a_measurement(result: dict[str, Any], recorded: Recorded) -> None:
    assert recorded(result).kind == "rl"
