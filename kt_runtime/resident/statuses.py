"""Answers to `GetStatus`, which may have to wait for the hash of the weights while the engine goes on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

from kt_runtime.resident.fingerprint import WeightsFingerprint
from kt_runtime.wire.messages import GetStatus, Reply


class _Asked(NamedTuple):
    request_id: str
    fingerprint: Future[str]
    deadline: float


class Statuses:
    """`describe(request id, fingerprint)` is the answer as of now; `reply` and `fail` are called once a request.

    `wake` is called, by any thread, when a hash is known that somebody waits for.
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
        """Whether `answer_due` would answer somebody now. Who only waits keeps nobody awake."""
        now = self._clock()
        return any(asked.fingerprint.done() or now >= asked.deadline for asked in self._asked)

    def ask(self, request: GetStatus) -> None:
        """Begins to compute the hash if nobody has yet; the answer comes now or from `answer_due`."""
        patience = math.inf if request.wait_s is None or request.verify_weights else request.wait_s
        fingerprint = self._weights.future(fresh=request.verify_weights)
        self._asked.append(_Asked(request.request_id, fingerprint, self._clock() + patience))
        fingerprint.add_done_callback(lambda _: self._wake())
        self.answer_due()

    def answer_due(self) -> None:
        """Answers those whose hash is known, and, without it, those who have waited as long as they would."""
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
