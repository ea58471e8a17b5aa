"""A thread that writes pages after they were offered, from memory of its own, so that nobody waits for the disk.

The memory is bounded. When the disk can't keep up, pages are dropped, not waited for: they can be computed again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kt_runtime.cache.buffers import BufferPool
from kt_runtime.cache.counters import Counters
from kt_runtime.cache.health import Availability, Use
from kt_runtime.cache.page import Page

_OPERATION_BYTES = 8 << 20
_HANGING = 5  # times the patience; a busy disk may take some seconds, and there is memory meanwhile

logger = logging.getLogger(__name__)


@dataclass
class _Operation:
    """`chain`: the keys of the whole prefix, the pages' own included; empty if more of its pages are to come.
    `action`: something else that only the writing thread may do."""

    pages: list[Page]
    chain: Sequence[bytes]
    action: Callable[[], None] | None = None


class WriteBehind:
    """`write(pages, chain)` stores pages and marks the chain as used; it may raise OSError. `keep` is called by the
    same thread about every `interval_s`, whatever else happens: syncing, looking after the directory.
    """

    def __init__(
        self,
        write: Callable[[Sequence[Page], Sequence[bytes]], None],
        keep: Callable[[], None],
        *,
        memory_bytes: int,
        interval_s: float,
        patience_s: float,
        availability: Availability,
        counters: Counters,
    ) -> None:
        self._write, self._keep = write, keep
        self._interval_s, self._patience_s = interval_s, patience_s
        self._availability, self._counters = availability, counters
        self._pool = BufferPool(memory_bytes)
        self._changed = threading.Condition()
        self._operations: deque[_Operation] = deque()
        self._pending: dict[bytes, memoryview] = {}
        self._is_closed = False
        self._began_s: float | None = None  # when the thread began what it is doing
        self._thread = threading.Thread(target=self._work, name="cache-write", daemon=True)
        self._thread.start()

    def __contains__(self, key: bytes) -> bool:
        return key in self._pending

    def offer(self, pages: Sequence[Page], chain: Sequence[bytes]) -> int:
        """Copies pages, in order, until there is no memory for the next; returns how many will be written.

        Waits for the disk when there is no memory, but not longer than `patience_s` for any page, and not at all while
        the disk takes longer than that for what it does.
        """
        self._notice_hanging()
        accepted, size = 0, 0
        copies: dict[bytes, memoryview] = {}
        for page in pages:
            if page.key not in self._pending and page.key not in copies:
                buffer = self._pool.take(page.payload_bytes) if self._availability[Use.WRITING] else None
                if buffer is None:
                    self._enqueue(copies, ())  # writing them makes room
                    copies, size = {}, 0
                    buffer = self._wait_for_buffer(page.payload_bytes)
                if buffer is None:
                    break
                page.copy_to(buffer)
                copies[page.key] = buffer
                size += len(buffer)
            accepted += 1
            if size >= _OPERATION_BYTES:  # the disk works while the rest is copied
                self._enqueue(copies, ())
                copies, size = {}, 0
        self._enqueue(copies, chain)
        self._counters.add("dropped", len(pages) - accepted)
        return accepted

    def _enqueue(self, copies: dict[bytes, memoryview], chain: Sequence[bytes]) -> None:
        if copies or chain:
            with self._changed:
                for key in copies.keys() & self._pending.keys():  # another caller was quicker
                    self._pool.give_back(copies.pop(key))
                pages = [Page(key, [buffer]) for key, buffer in copies.items()]
                self._pending |= copies
                self._operations.append(_Operation(pages, chain))
                self._changed.notify_all()

    def fetch(self, page: Page) -> bool:
        """Fills `page` from what has not been written yet; False if it isn't among that."""
        with self._changed:
            buffer = self._pending.get(page.key)
            if buffer is None or len(buffer) != page.payload_bytes:
                return False
            page.fill(buffer)
            return True

    def flush(self, timeout_s: float) -> bool:
        """Waits until nothing is pending. False if that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, timeout_s)

    def run(self, action: Callable[[], None], timeout_s: float) -> bool:
        """Lets the writing thread do something after what is pending. False if it takes longer or the disk fails."""
        done = threading.Event()

        def act() -> None:
            action()
            done.set()

        with self._changed:
            self._operations.append(_Operation([], (), act))
            self._changed.notify_all()
        return done.wait(timeout_s)

    def drop_all(self) -> None:
        """What is pending is not written, except what is being written just now."""
        with self._changed:
            while self._operations:
                self._drop(self._operations.popleft())
            self._changed.notify_all()

    def close(self, timeout_s: float) -> bool:
        """Writes what is pending, then ends the thread. False if it still hangs after `timeout_s`.

        A disk that is not done in four fifths of that time writes only what it has begun.
        """
        deadline = time.monotonic() + timeout_s
        if not self.flush(0.8 * timeout_s):
            self.drop_all()
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def _notice_hanging(self) -> None:
        """Says so, and takes nothing more, while the disk keeps the thread for long; what waits is written after."""
        limit_s = _HANGING * self._patience_s
        if self._busy_s() > limit_s:
            self._availability.lose(f"a write takes longer than {limit_s:g} s", Use.WRITING, is_late=True)

    def _busy_s(self) -> float:
        """For how long the thread has been doing what it does now, 0 while it waits for something to do."""
        began_s = self._began_s
        return 0.0 if began_s is None else time.monotonic() - began_s

    def _wait_for_buffer(self, size: int) -> memoryview | None:
        """None: the disk is slower than pages come, and nobody is kept waiting for it. It hangs only if one call takes
        long (`_notice_hanging`), not because much waits to be written."""
        buffer, waited_until_s = None, time.monotonic() + self._patience_s
        while buffer is None and self._availability[Use.WRITING]:
            now = time.monotonic()
            left_s = min(waited_until_s - now, self._patience_s - self._busy_s())
            buffer = self._pool.take(size, max(0.0, left_s))
            if left_s <= 0 or time.monotonic() < now + left_s:  # refused at once: the machine has no memory for it
                break
        if buffer is None:
            self._notice_hanging()
        return buffer

    def _drop(self, operation: _Operation) -> None:
        """Under the lock."""
        self._counters.add("dropped", len(operation.pages))
        self._release(operation)

    def _release(self, operation: _Operation) -> None:
        """Under the lock."""
        for page in operation.pages:
            buffer = self._pending.pop(page.key, None)
            if buffer is not None:
                self._pool.give_back(buffer)
        self._changed.notify_all()

    def _work(self) -> None:
        next_keep_s = time.monotonic() + self._interval_s
        while True:
            with self._changed:
                wait_s = max(0.0, next_keep_s - time.monotonic())
                self._changed.wait_for(lambda: self._operations or self._is_closed, wait_s)
                if self._is_closed and not self._operations:
                    return
                operation = self._operations.popleft() if self._operations else None
                self._began_s = time.monotonic()
            if operation is not None:
                self._perform(operation)
            if time.monotonic() >= next_keep_s:
                self._look_after()
                next_keep_s = time.monotonic() + self._interval_s
            self._began_s = None
            if self._availability.is_late(Use.WRITING):
                self._availability.regain(Use.WRITING)

    def _look_after(self) -> None:
        try:
            self._keep()
        except Exception as error:
            logger.exception("cache: looking after the directory failed for a reason of our own")
            self._availability.lose(error, Use.WRITING)

    def _perform(self, operation: _Operation) -> None:
        is_written = False
        try:
            if operation.action is not None:  # also while writing is stopped: emptying a full disk makes room
                operation.action()
                is_written = True
            elif self._availability[Use.WRITING]:
                self._write(operation.pages, operation.chain)
                is_written = True
        except OSError as error:
            self._counters.add("write_errors")
            self._availability.lose(error, Use.WRITING)
        except Exception as error:
            logger.exception("cache: writing failed for a reason of our own")
            self._availability.lose(error, Use.WRITING)
        finally:
            with self._changed:
                self._release(operation) if is_written else self._drop(operation)
