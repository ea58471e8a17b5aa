"""A trainer that runs during the load: steps without a pause, on its own thread, with the time of each step's end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from kt_runtime.bench.interfere.plan import FIRST_TOKEN, Plan
from kt_runtime.bench.train.plan import LEARNING_RATE
from kt_runtime.cli.connection import ServerAPI, resident_client
from kt_runtime.wire import Batch
from kt_runtime.wire.messages import LoraSettings

SESSION = "bench-interfere"
TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class Moment:
    """`at_s`: on the performance counter. `training_s`, `serving_s`: the server's seconds of training's slices, and of
    its work for requests, until then."""

    at_s: float
    training_s: float
    serving_s: float


def moment(api: ServerAPI) -> Moment:
    """The server's counts and the time of its answer, which it gives between two turns."""
    turns = api.get("/kt/status")["training_turns"]
    return Moment(time.perf_counter(), float(turns["training_s"]), float(turns["serving_s"]))


class Trainer:
    """`ends`: of the steps so far."""

    def __init__(self, api: ServerAPI, plan: Plan, vocabulary: int) -> None:
        self.ends: list[Moment] = []
        self._api, self._plan = api, plan
        self._batch = _batch(plan, vocabulary)
        self._stopping = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def wait_for_steps(self, count: int) -> None:
        """Raises the trainer's error. Waits until so many steps have ended since the start."""
        while len(self.ends) < count:
            self._thread.join(0.02)
            if not self._thread.is_alive():
                self._raise()
                return

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends after the step under way. Raises the trainer's error."""
        self._stopping.set()
        self._thread.join()
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            with resident_client(self._api, TIMEOUT_S) as client:
                client.create_session(SESSION, LoraSettings(rank=self._plan.rank, alpha=16.0, targets=["attention"]))
                while not self._stopping.is_set():
                    client.forward_backward(SESSION, self._batch)
                    client.optim_step(SESSION, LEARNING_RATE)
                    self.ends.append(moment(self._api))
                client.close_session(SESSION)
        except Exception as error:  # noqa: BLE001 - raised on the thread that waits
            self._error = error


@contextmanager
def training(api: ServerAPI, plan: Plan, vocabulary: int) -> Iterator[Trainer]:
    """A trainer that has finished its first step."""
    trainer = Trainer(api, plan, vocabulary)
    trainer.start()
    try:
        trainer.wait_for_steps(1)
        yield trainer
    finally:
        trainer.stop()


def _batch(plan: Plan, vocabulary: int) -> Batch:
    rows = np.random.default_rng(plan.seed + 2).integers(FIRST_TOKEN, vocabulary, (plan.sequences, plan.tokens))
    weights = np.full(rows.shape, 1.0 / (plan.sequences * (plan.tokens - 1)))
    weights[:, -1] = 0.0
    return Batch.from_sequences(rows.tolist(), np.roll(rows, -1, axis=1).tolist(), weights.tolist())
