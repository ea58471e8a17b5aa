"""Events: the trainer's log as it grows, is cut short by a resumed run, and as a crash leaves it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kt_runtime.serve.finetuning.events import EVENTS_FILE, LOG_FILE, EventLog


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for name in ("job", "out"):
        (tmp_path / name).mkdir()
    return tmp_path


def log_of(place: Path) -> EventLog:
    return EventLog(place / "job", place / "out", "ftjob-X")


def line(step: int, **figures: Any) -> str:
    return json.dumps({"current_steps": step, "total_steps": 9, "loss": step / 8, "elapsed_time": "0:01", **figures})


def test_each_step_and_evaluation_is_one_event_also_across_a_resumed_run(place: Path) -> None:
    trainers, events = place / "out" / LOG_FILE, log_of(place)
    events.collect()
    trainers.write_text(f"{line(1)}\n{line(2)}\n" + line(3)[:20])
    events.collect()
    assert [event["data"]["step"] for event in events.read()] == [1, 2]
    with trainers.open("a") as file:
        file.write(f"{line(3)[20:]}\n" + json.dumps({"current_steps": 3, "eval_loss": 0.5}) + "\n")
    events.collect()
    resumed = log_of(place)
    replaced = place / "out" / "new"
    replaced.write_text(f"{line(1)}\n")
    replaced.rename(trainers)
    resumed.collect()
    with trainers.open("a") as file:
        file.write("".join(f"{line(step)}\n" for step in (2, 3, 4)))
    resumed.collect()
    found = resumed.read()
    assert [(event["data"]["step"], event["data"]["kind"]) for event in found] == [
        *((step, "step") for step in (1, 2, 3)),
        (3, "evaluation"),
        (4, "step"),
    ]
    assert found[3]["data"]["full_valid_loss"] == 0.5 and found[0]["message"] == "Step 1/9: training loss=0.1250"
    assert len({event["id"] for event in found}) == 5 and "elapsed_time" not in found[0]["data"]
    assert resumed.at_step(3) == {"step": 3, "train_loss": 0.375, "full_valid_loss": 0.5}


def test_a_line_that_a_crash_cut_off_is_left_out_and_the_next_ones_are_whole(place: Path) -> None:
    events = log_of(place)
    events.note("one")
    path = place / "job" / EVENTS_FILE
    with path.open("a") as file:
        file.write('{"id": "cut')
    log_of(place).note("two", "warn")
    assert [(event["message"], event["level"]) for event in log_of(place).read()] == [("one", "info"), ("two", "warn")]
    assert path.stat().st_mode & 0o077 == 0
