"""The journal writes what LLaMA-Factory's users read."""

from __future__ import annotations

import json
from pathlib import Path

from kt_runtime.train.journal import Journal


def test_lines_have_the_keys_and_values_that_scripts_expect(tmp_path: Path) -> None:
    now = [100.0]
    said: list[str] = []
    journal = Journal(tmp_path, 4, 2.0, said.append, clock=lambda: now[0])
    for step, loss in enumerate([4.0, 2.0, 1.0, 0.5], start=1):
        now[0] += 10.0
        journal.step(loss, 50, 0.1, 1.0, write=step % 2 == 0)
    first, last = [json.loads(line) for line in (tmp_path / "trainer_log.jsonl").read_text().splitlines()]
    assert first == {
        "current_steps": 2,
        "total_steps": 4,
        "loss": 3.0,
        "lr": 0.1,
        "epoch": 1.0,
        "percentage": 50.0,
        "elapsed_time": "0:00:20",
        "remaining_time": "0:00:20",
        "throughput": 5.0,
        "total_tokens": 100,
    }
    assert last["loss"] == 0.75 and last["remaining_time"] == "0:00:00"
    assert "step 2/4  loss 3.0000" in said[0]
    results = journal.finish(tmp_path)
    assert results["train_loss"] == 1.875 and results["epoch"] == 2.0
    assert json.loads((tmp_path / "train_results.json").read_text()) == results
