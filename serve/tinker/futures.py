"""Answers that clients fetch later: `retrieve_future` waits for one. Belongs to one event loop.

A future is opened under a key, such as a run and a `seq_id`: the same key gives the same future, so a resent request is
never executed twice. A finished future is kept for clients that ask again after a lost connection, until it is old or
until newer ones need its place; asking for it then is answered as an unknown id, with status 410.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Literal

from kt_runtime.errors import UserError
from kt_runtime.serve.tinker.protocol.results import Result

Category = Literal["user", "server"]
MAX_KEPT, MAX_KEPT_BYTES = 8192, 256 << 20
KEPT_SECONDS = 900.0


@dataclass(frozen=True)
class Failure:
    """As clients see it: `category` "user" means that the request was wrong."""

    message: str
    category: Category

    @classmethod
    def of(cls, error: Exception) -> Failure:
        return cls(str(error) or type(error).__name__, "user" if isinstance(error, UserError) else "server")


ENDED = Failure("the client's session has ended", "user")


@dataclass(eq=False)
class Future:
    """`owner`: the client's session. `facts`: further fields of the answer to the request that opened the future."""

    request_id: str
    key: Hashable
    owner: str
    facts: dict[str, object] = field(default_factory=dict)
    outcome: Result | Failure | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)
    finished_at: float = 0.0

    @property
    def num_bytes(self) -> int:
        return 1024 if self.outcome is None or isinstance(self.outcome, Failure) else self.outcome.num_bytes


class Futures:
    """`max_kept`, `max_bytes`, `kept_s`: bounds of the finished futures, except the newest. Unfinished ones are bounded
    by whoever opens them."""

    def __init__(
        self,
        *,
        max_kept: int = MAX_KEPT,
        max_bytes: int = MAX_KEPT_BYTES,
        kept_s: float = KEPT_SECONDS,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_kept, self._max_bytes, self._kept_s, self._now = max_kept, max_bytes, kept_s, now
        self._kept_bytes = 0
        self._by_id: dict[str, Future] = {}
        self._by_key: dict[Hashable, Future] = {}
        self._finished: OrderedDict[str, Future] = OrderedDict()

    def known(self, key: Hashable) -> Future | None:
        return self._by_key.get(key)

    def get(self, request_id: str) -> Future | None:
        self._forget_old()
        return self._by_id.get(request_id)

    def open(self, key: Hashable, owner: str) -> Future:
        """A new future. The key must not be known."""
        assert key not in self._by_key
        future = Future(secrets.token_hex(12), key, owner)
        self._by_id[future.request_id] = self._by_key[key] = future
        return future

    def finish(self, future: Future, outcome: Result | Failure) -> None:
        """Sets the outcome, once for each future; a later one is ignored."""
        if future.outcome is not None:
            return
        future.outcome, future.finished_at = outcome, self._now()
        future.done.set()
        if future.request_id in self._by_id:
            self._finished[future.request_id] = future
            self._kept_bytes += future.num_bytes
        self._forget_old()

    async def wait(self, future: Future, seconds: float) -> bool:
        """Whether the future is finished within `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await future.done.wait()
        except TimeoutError:
            return False
        return True

    def end_owner(self, owner: str, failure: Failure) -> None:
        """The owner's unfinished futures end with `failure`."""
        for future in [future for future in self._by_id.values() if future.owner == owner]:
            self.finish(future, failure)

    @property
    def num_open(self) -> int:
        return len(self._by_id) - len(self._finished)

    def _forget_old(self) -> None:
        while self._finished:
            oldest = next(iter(self._finished.values()))
            is_full = len(self._finished) > self._max_kept or (
                self._kept_bytes > self._max_bytes and len(self._finished) > 1
            )
            if not is_full and self._now() - oldest.finished_at < self._kept_s:
                return
            self._kept_bytes -= oldest.num_bytes
            del self._finished[oldest.request_id], self._by_id[oldest.request_id], self._by_key[oldest.key]
