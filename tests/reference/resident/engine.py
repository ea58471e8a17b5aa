"""The engine's loop without SGLang: it carries a resident with a real wire server, over a host of the tests."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zmq

from kt_runtime.resident.config import ResidentSettings
from kt_runtime.resident.handlers import SessionHandlers
from kt_runtime.resident.server import Resident
from kt_runtime.resident.training.session import Session
from kt_runtime.wire.batch import Batch
from kt_runtime.wire.client import ResidentClient
from kt_runtime.wire.messages import LoraSettings

LORA = LoraSettings(rank=4, alpha=8.0)

# Longer than a test leaves the engine alone, also on a busy machine: only what nothing woke sleeps so long.
SLEEP_SECONDS = 120.0


class Engine:
    """The engine's loop on a thread of its own, in inference mode as SGLang's. It sleeps until something wakes it.

    `asleep`: how often it has slept; `overslept`: how often nothing woke it.
    """

    def __init__(self, host: Any, root: Path) -> None:
        self.host = host
        self.settings = ResidentSettings(
            model=host.model,
            model_directory=host.model_directory,
            wire_address=f"ipc://{root}/wire/r.sock",
            names_address="",
            adapter_directory=str(root / "adapters"),
            microbatch_tokens=32,
        )
        self.paused, self._stop = threading.Event(), threading.Event()
        self.resident = Resident.start(host, self.settings)
        self.payloads: list[list[bytes]] = []
        self.asleep = self.overslept = 0
        self._poller = zmq.Poller()
        for wakeup in self.resident.wakeups:
            self._poller.register(wakeup, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with torch.inference_mode():
            while not self._stop.is_set():
                if not self.paused.is_set():
                    decided = self.resident.decisions()
                    self.payloads += [decided] if decided else []
                    self.resident.apply(decided)
                    self.resident.turn()
                if self.paused.is_set():
                    time.sleep(0.001)
                elif not self.resident.has_work():
                    self.asleep += 1
                    self.overslept += not self._poller.poll(int(SLEEP_SECONDS * 1000))

    def close(self) -> None:
        self._stop.set()
        self.host.frontend.set()
        self._thread.join()
        self.resident.close()
        assert self.overslept == 0

    def client(self, **settings: Any) -> ResidentClient:
        return ResidentClient(self.settings.wire_address, timeout_s=60, **settings)


def sessions_of(resident: Resident) -> dict[str, Session]:
    assert isinstance(resident.handlers, SessionHandlers)
    return resident.handlers._sessions


def sequences(seed: int = 0, *lengths: int) -> Batch:
    random = np.random.default_rng(seed)
    tokens = [random.integers(0, 300, length).tolist() for length in lengths or (20, 9)]
    return Batch.from_sequences(tokens, [[*row[1:], 0] for row in tokens])


def train(client: ResidentClient, session: str, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        losses.append(client.forward_backward(session, sequences(step % 2)).loss)
        client.optim_step(session, 1e-2)
    return losses
