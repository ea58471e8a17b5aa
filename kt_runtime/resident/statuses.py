"""Answers to `GetStatus`, which may wait for the hash of the weights while the engine keeps serving."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

from kt_runtime.resident.fingerprint import WeightsFingerprint
from kt_runtime.wire.messages import GetStatus
from kt_runtime.wire.replies import Reply


class _Asked(NamedTuple):
    request_id: str
    fingerprint: Future[str]
    deadline: float


class Statuses:
    """`describe(request id, fingerprint)` builds the current answer. Each request gets one call of `reply` or `fail`.

    `wake` is called, on any thread, when a hash that a request waits for is ready.
    """

    def __init__(
        self,
        weights: WeightsFingerprint,
        describe: Callable[[str, str], Reply],
        reply: Callable[[Reply], None],
        fail: Callable[[str, Exception], None],
        clock: Callable[[], float] = time.monotonic,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._weights, self._describe, self._reply, self._fail, self._clock = weights, describe, reply, fail, clock
        self._wake = wake
        self._asked: list[_Asked] = []

    @property
    def is_due(self) -> bool:
        """Whether `answer_due` would answer a request now. Requests that still wait do not keep the engine awake."""
        now = self._clock()
        return any(asked.fingerprint.done() or now >= asked.deadline for asked in self._asked)

    def ask(self, request: GetStatus) -> None:
        """Starts computing the hash if necessary; answers now, or later in `answer_due`."""
        patience = math.inf if request.wait_s is None or request.verify_weights else request.wait_s
        fingerprint = self._weights.future(fresh=request.verify_weights)
        self._asked.append(_Asked(request.request_id, fingerprint, self._clock() + patience))
        fingerprint.add_done_callback(lambda _: self._wake())
        self.answer_due()

    def answer_due(self) -> None:
        """Answers requests whose hash is known and, with an empty hash, requests whose `wait_s` has passed."""
        now = self._clock()
        due = [asked for asked in self._asked if asked.fingerprint.done() or now >= asked.deadline]
        self._asked = [asked for asked in self._asked if asked not in due]
        for asked in due:
            error = asked.fingerprint.exception() if asked.fingerprint.done() else None
            if isinstance(error, Exception):
                self._fail(asked.request_id, error)
            else:
                known = asked.fingerprint.result() if asked.fingerprint.done() else ""
                self._reply(self._describe(asked.request_id, known))
