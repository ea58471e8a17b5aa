"""The demo does what the README says, and its figures are the run's own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kt_runtime.bench.page.timeline import Timeline, read_timeline

KEYS = {
    "model",
    "sglang_version",
    "before",
    "after",
    "expected",
    "loss_first",
    "loss_last",
    "publish_ms",
    "optim_to_first_token_ms",
    "streams_total",
    "streams_failed",
    "weights_shared_bytes",
    "weights_copied_bytes",
    "base_weights_unchanged",
    "rss_serving_bytes",
    "rss_training_bytes",
}


def test_the_answer_changes_and_nothing_else_does(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "kt_runtime.cli.main", "demo", "--json", str(tmp_path / "demo.json")]
    command += ["--timeline", str(tmp_path / "times.json")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=tmp_path)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    print(run.stdout)
    figures = json.loads((tmp_path / "demo.json").read_text())
    assert set(figures) == KEYS
    assert figures["after"] == figures["expected"] != figures["before"]
    assert figures["loss_last"] < figures["loss_first"] / 4
    assert figures["streams_total"] >= 8 and figures["streams_failed"] == 0
    assert figures["weights_copied_bytes"] == 0 < figures["weights_shared_bytes"]
    assert figures["base_weights_unchanged"] is True
    assert figures["optim_to_first_token_ms"] > figures["publish_ms"] > 0
    assert figures["rss_training_bytes"] > figures["rss_serving_bytes"] > 0
    times_are_the_runs(read_timeline(tmp_path / "times.json"), figures)


def times_are_the_runs(times: Timeline, figures: dict[str, Any]) -> None:
    """Each answered stream is there. Every other client asks the adapter, after its last step."""
    assert len(times.streams) == figures["streams_total"]
    assert (times.before, times.after) == (figures["before"], figures["after"])
    waited_ms = (times.first_token_s - times.optim_finished_s) * 1e3
    assert waited_ms == pytest.approx(figures["optim_to_first_token_ms"], abs=1.001)  # two times, each rounded to 1 ms
    asked = [(client, began) for client, began, _, by_adapter in times.streams if by_adapter]
    assert {client for client, _ in asked} == {1, 3, 5, 7} and min(began for _, began in asked) > times.optim_finished_s
    assert [step for _, step, _ in times.steps] == [5, 10, 15, 20, 24]
    assert times.steps == sorted(times.steps) and times.steps[0][0] > 0
