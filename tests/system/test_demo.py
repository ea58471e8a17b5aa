"""The demo does what the README says, and its figures are the run's own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

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
