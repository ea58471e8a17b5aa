"""The events of a job: what the server notes, and the lines of the trainer's `trainer_log.jsonl`, in one file.

    ROOT/jobs/ftjob-ID/events.jsonl     one event a line, the oldest first

A line of the trainer's log becomes one event, also where a resumed run writes it again: an event of a step and kind
that the file has is left out.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

EVENTS_FILE, LOG_FILE = "events.jsonl", "trainer_log.jsonl"
Level = Literal["info", "warn", "error"]
NAMES = {"loss": "train_loss", "eval_loss": "full_valid_loss", "reward": "train_mean_reward"}
NAMES |= {"eval_reward": "full_valid_mean_reward", "accuracy": "train_preference_accuracy"}
SKIPPED = ("current_steps", "total_steps", "elapsed_time", "remaining_time", "percentage", "throughput")


class EventLog:
    """The events of one job; any thread may call it. `place`: the job's directory; `output`: the trainer's."""

    def __init__(self, place: Path, output: Path, job_id: str) -> None:
        self._path, self._log, self._job_id = place / EVENTS_FILE, output / LOG_FILE, job_id
        events = self.read()
        self._number = len(events)
        self._seen = {_key(event["data"]) for event in events if event["type"] == "metrics"}
        self._offset, self._inode = 0, 0
        self._lock = threading.Lock()

    def read(self) -> list[dict[str, Any]]:
        """OpenAI's event objects, the oldest first. A last line that a crash cut off is left out."""
        events = []
        with contextlib.suppress(FileNotFoundError):
            for line in self._path.read_bytes().splitlines():
                with contextlib.suppress(ValueError):
                    events.append(json.loads(line))
        return events

    def note(self, message: str, level: Level = "info") -> None:
        with self._lock:
            self._append([self._event(message, level, "message", None)])

    def collect(self) -> None:
        """Takes over the new lines of the trainer's log."""
        with self._lock:
            made = []
            for line in self._new_lines():
                data = metrics_of(line)
                if _key(data) not in self._seen:
                    self._seen.add(_key(data))
                    made.append(self._event(_shown(data), "info", "metrics", data))
            self._append(made)

    def at_step(self, step: int) -> dict[str, float]:
        """The figures of the last lines up to `step`."""
        found: dict[str, float] = {}
        for event in self.read():
            if event["type"] == "metrics" and event["data"]["step"] <= step:
                found |= event["data"]
        return {name: value for name, value in found.items() if name not in ("kind", "total_steps")}

    def _event(self, message: str, level: Level, kind: str, data: Mapping[str, Any] | None) -> dict[str, Any]:
        self._number += 1
        return {
            "object": "fine_tuning.job.event",
            "id": f"ftevent-{self._job_id.removeprefix('ftjob-')}-{self._number}",
            "created_at": int(time.time()),
            "level": level,
            "message": message,
            "type": kind,
            "data": data,
        }

    def _append(self, events: list[dict[str, Any]]) -> None:
        if not events:
            return
        text = "".join(json.dumps(event) + "\n" for event in events).encode()
        descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            size_bytes = os.fstat(descriptor).st_size
            if size_bytes and os.pread(descriptor, 1, size_bytes - 1) != b"\n":  # a crash cut the last line off
                text = b"\n" + text
            os.write(descriptor, text)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _new_lines(self) -> list[dict[str, Any]]:
        """Whole lines since the last call. A resumed trainer replaces its log by a shorter one: that is read anew."""
        try:
            with self._log.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._inode, self._offset = status.st_ino, 0
                file.seek(self._offset)
                read = file.read()
        except FileNotFoundError:
            return []
        whole = read[: read.rfind(b"\n") + 1]
        self._offset += len(whole)
        lines = []
        for line in whole.splitlines():
            with contextlib.suppress(ValueError):
                lines.append(json.loads(line))
        return [line for line in lines if isinstance(line, dict) and isinstance(line.get("current_steps"), int)]


def metrics_of(line: Mapping[str, Any]) -> dict[str, Any]:
    """The event's data: OpenAI's names where it has one, the trainer's for the rest."""
    is_evaluation = any(name.startswith("eval_") for name in line)
    figures = {NAMES.get(name, name): value for name, value in line.items() if name not in SKIPPED}
    numbers = {name: value for name, value in figures.items() if isinstance(value, int | float)}
    kind = "evaluation" if is_evaluation else "step"
    return {"step": line["current_steps"], "total_steps": line.get("total_steps"), "kind": kind, **numbers}


def _key(data: Mapping[str, Any]) -> tuple[int, str]:
    return data["step"], data["kind"]


def _shown(data: Mapping[str, Any]) -> str:
    names = {
        "train_loss": "training loss",
        "train_mean_reward": "mean reward",
        "full_valid_loss": "full validation loss",
        "full_valid_mean_reward": "validation reward",
    }
    figures = ", ".join(f"{shown}={data[name]:.4f}" for name, shown in names.items() if name in data)
    return f"Step {data['step']}/{data['total_steps']}: {figures}"
