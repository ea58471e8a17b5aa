"""A host's side of the connections between hosts: an event loop in a thread of its own.

The main thread waits in it for the agreement, and afterwards loads the model and serves. The loop also sends and
receives messages while the main thread imports modules or waits for ranks.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from kt_runtime.ranks.failures import Failure
from kt_runtime.serve.hosts.messages import ProcessLook

_T = TypeVar("_T")

BEAT_SECONDS = 1.0
# A host that sends nothing for so long has stopped, although its machine answers. Before it has ranks it imports
# modules, some of which hold Python's lock for seconds on a busy machine, and nothing waits for it yet.
SILENT_SECONDS, SILENT_BEFORE_RANKS_SECONDS = 7.0, 60.0
JOIN_SECONDS = 600.0
END_SECONDS = 3.0
"""How long a host that ends waits for the others to have heard of it."""


class Loop:
    """`submit` runs a coroutine in the thread; `call` waits for its result."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._has_stopped = False
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, _T]) -> concurrent.futures.Future[_T]:
        """Raises ConnectionError after `stop`."""
        if self._has_stopped:
            work.close()
            raise ConnectionError("the connections between hosts have ended")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Coroutine[Any, Any, _T], timeout_s: float | None = None) -> _T:
        future = self.submit(work)
        try:
            return future.result(timeout_s)
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        if not self._has_stopped:
            ending = self.submit(self._cancel_all())
            self._has_stopped = True
            ending.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._loop.stop))
            self._thread.join(END_SECONDS)

    async def _cancel_all(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


class Shared:
    """What the thread of the connections and the others tell each other. Thread-safe.

    `looks`: returns this host's ranks now; None until it has started some. `ended`: set once the server ends:
    `lines` say why, `status` is the exit status, 0 in order.
    """

    def __init__(self) -> None:
        self.looks: Callable[[], list[ProcessLook]] | None = None
        self.ended = threading.Event()
        self.lines: list[str] = []
        self.status = 0
        self._lock = threading.Lock()
        self._failures: list[Failure] = []

    def fail(self, failure: Failure) -> None:
        with self._lock:
            self._failures.append(failure)

    def failures(self) -> list[Failure]:
        with self._lock:
            return list(self._failures)

    def own_looks(self) -> list[ProcessLook]:
        return [] if self.looks is None else self.looks()

    def end(self, lines: list[str], status: int) -> None:
        """Only the first call counts."""
        with self._lock:
            if not self.ended.is_set():
                self.lines, self.status = lines, status
                self.ended.set()
