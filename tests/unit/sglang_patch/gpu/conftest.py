"""SGLang's breakable graphs on a CPU, and a device that keeps a log of its streams and events."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from reference.on_device.recorded_graph import GraphBackend, RecordedGraph

from kt_runtime.experts.gpu.staging import StagingBuffers
from kt_runtime.sglang_patch.gpu import experts


class LoggedStream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log

    def wait_event(self, event: str) -> None:
        self._log.append(f"{self.name} waits for {event}")


class LoggedDevice:
    """Stands in for `kt_runtime.device` in `experts.py`: an event is the name of the stream that recorded it. Nothing
    waits for a whole device."""

    def __init__(self, log: list[str]) -> None:
        self._log = log
        self._current = self._model = LoggedStream("model", log)

    def current_stream(self, _: torch.device) -> LoggedStream:
        return self._current

    def new_stream(self, _: torch.device) -> LoggedStream:
        return LoggedStream("experts", self._log)

    @contextmanager
    def on(self, stream: LoggedStream) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before

    def recorded(self, stream: LoggedStream | None = None, device: Any = None) -> str:
        name = (stream or self._current).name
        self._log.append(f"{name} records")
        return f"{name}'s event"


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What graphs, streams and events did, in order. Graphs are recorded ones."""
    made: list[str] = []
    monkeypatch.setattr(RecordedGraph, "log", made, raising=False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", RecordedGraph)
    monkeypatch.setattr(experts, "device", LoggedDevice(made))
    monkeypatch.setattr(experts, "_streams", {})
    return made


@pytest.fixture
def sets(monkeypatch: pytest.MonkeyPatch) -> dict[int, StagingBuffers]:
    """The pinned buffers by captured decode size; none at first."""
    made: dict[int, StagingBuffers] = {}
    monkeypatch.setattr(experts, "_sets", made)
    return made


@pytest.fixture
def graphs(patched_sglang: None, log: list[str], sets: dict[int, StagingBuffers]) -> GraphBackend:
    return GraphBackend()
