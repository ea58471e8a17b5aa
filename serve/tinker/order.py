"""The order of one run's calls: `seq_id` 1, 2, 3, ..., which may arrive in any order.

Clients send a batch in chunks at once, the first chunk last, and do not wait for one call before they send the next.
A call waits until every earlier one has been taken. A gap that stays open too long is given up: the calls that wait
behind it end with an error, and later calls are taken.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, TypeVar

from kt_runtime.errors import InvalidValueError, ServerBusyError

MAX_WAITING = 1024
MAX_WAITING_BYTES = 256 << 20
GAP_SECONDS = 360.0  # clients resend a call for 5 minutes

_C = TypeVar("_C")


class CallOrder(Generic[_C]):
    """`max_bytes`, `max_waiting`: bounds of the calls that wait for an earlier one; the next call is always taken."""

    def __init__(
        self,
        *,
        max_waiting: int = MAX_WAITING,
        max_bytes: int = MAX_WAITING_BYTES,
        gap_s: float = GAP_SECONDS,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_waiting, self._max_bytes, self._gap_s, self._now = max_waiting, max_bytes, gap_s, now
        self._waiting: dict[int, tuple[_C, int]] = {}
        self._next = 1
        self._gap_since = now()

    def check(self, seq_id: int | None, num_bytes: int = 0) -> int:
        """The call's place. Raises InvalidValueError for a place that was taken, ServerBusyError if too much waits.

        `seq_id` None, from clients that send none: the first free place.
        """
        place = self._first_free() if seq_id is None else seq_id
        if place < self._next or place in self._waiting:
            raise InvalidValueError(f"seq_id {place}: call {self._next} is next; this one was made before")
        total = num_bytes + sum(size for _, size in self._waiting.values())
        if place != self._next and (len(self._waiting) >= self._max_waiting or total > self._max_bytes):
            raise ServerBusyError(f"{len(self._waiting)} calls wait for call {self._next}; send this one again later")
        return place

    def put(self, place: int, call: _C, num_bytes: int = 0) -> None:
        """`place`: from `check`."""
        if not self._waiting:
            self._gap_since = self._now()
        self._waiting[place] = (call, num_bytes)

    def take(self) -> _C | None:
        """The next call, if it is there."""
        if self._next not in self._waiting:
            return None
        call, _ = self._waiting.pop(self._next)
        self._next += 1
        self._gap_since = self._now()
        return call

    def given_up(self) -> tuple[int, list[_C]]:
        """The missing place and the calls behind it, if that place has been missing too long; else no calls."""
        missing = self._next
        if not self._waiting or missing in self._waiting or self._now() - self._gap_since < self._gap_s:
            return missing, []
        calls = [self._waiting[place][0] for place in sorted(self._waiting)]
        self._next = max(self._waiting) + 1
        self._waiting.clear()
        return missing, calls

    def drain(self) -> list[_C]:
        """Takes out everything that waits."""
        calls = [call for call, _ in self._waiting.values()]
        self._waiting.clear()
        return calls

    def _first_free(self) -> int:
        place = self._next
        while place in self._waiting:
            place += 1
        return place
