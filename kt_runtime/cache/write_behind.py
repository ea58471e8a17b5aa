"""A thread that writes pages after callers offered them, from buffers of its own, so that no caller waits for the disk.

Memory is bounded. When the disk can't keep up, pages are dropped instead of waited for: they can be computed again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kt_runtime.cache.disk import Counters, Health, Use
from kt_runtime.cache.page import BufferPool, Page

_OPERATION_BYTES = 8 << 20
_HANGING = 5  # times `patience_s`; writes of a busy disk may take some seconds, and memory buffers them

logger = logging.getLogger(__name__)


@dataclass
class _Operation:
    """`chain`: the keys of the whole prefix, those of `pages` included; empty if more of its pages will follow.
    `action`: another task for the writing thread."""

    pages: list[Page]
    chain: Sequence[bytes]
    action: Callable[[], None] | None = None


class WriteBehind:
    """`write(pages, chain)` stores pages and marks the chain as used; it may raise OSError. The same thread calls
    `keep` (sync, directory check) about every `interval_s`, whatever else happens.
    """

    def __init__(
        self,
        write: Callable[[Sequence[Page], Sequence[bytes]], None],
        keep: Callable[[], None],
        *,
        memory_bytes: int,
        interval_s: float,
        patience_s: float,
        health: Health,
        counters: Counters,
    ) -> None:
        self._write, self._keep = write, keep
        self._interval_s, self._patience_s = interval_s, patience_s
        self._health, self._counters = health, counters
        self._pool = BufferPool(memory_bytes)
        self._changed = threading.Condition()
        self._operations: deque[_Operation] = deque()
        self._pending: dict[bytes, memoryview] = {}
        self._is_closed = False
        self._began_s: float | None = None  # start of the thread's current task
        self._thread = threading.Thread(target=self._work, name="cache-write", daemon=True)
        self._thread.start()

    def __contains__(self, key: bytes) -> bool:
        return key in self._pending

    def offer(self, pages: Sequence[Page], chain: Sequence[bytes]) -> int:
        """Copies pages, in order, until there is no memory for the next; returns how many will be written.

        Without free memory it waits for the disk, at most `patience_s` for any page, and not at all while the current
        disk operation takes longer than that.
        """
        self._notice_hanging()
        accepted, size = 0, 0
        copies: dict[bytes, memoryview] = {}
        for page in pages:
            if page.key not in self._pending and page.key not in copies:
                buffer = self._pool.take(page.payload_bytes) if self._health[Use.WRITING] else None
                if buffer is None:
                    self._enqueue(copies, ())  # writing these frees memory
                    copies, size = {}, 0
                    buffer = self._wait_for_buffer(page.payload_bytes)
                if buffer is None:
                    break
                page.copy_to(buffer)
                copies[page.key] = buffer
                size += len(buffer)
            accepted += 1
            if size >= _OPERATION_BYTES:  # the disk writes these while the rest is copied
                self._enqueue(copies, ())
                copies, size = {}, 0
        self._enqueue(copies, chain)
        self._counters.add("dropped", len(pages) - accepted)
        return accepted

    def _enqueue(self, copies: dict[bytes, memoryview], chain: Sequence[bytes]) -> None:
        if copies or chain:
            with self._changed:
                for key in copies.keys() & self._pending.keys():  # another caller offered the same page first
                    self._pool.give_back(copies.pop(key))
                pages = [Page(key, [buffer]) for key, buffer in copies.items()]
                self._pending |= copies
                self._operations.append(_Operation(pages, chain))
                self._changed.notify_all()

    def fetch(self, page: Page) -> bool:
        """Fills `page` from the pages that are not written yet; False if it is not among them."""
        with self._changed:
            buffer = self._pending.get(page.key)
            if buffer is None or len(buffer) != page.payload_bytes:
                return False
            page.fill(buffer)
            return True

    def flush(self, timeout_s: float) -> bool:
        """Waits until nothing is pending. False after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, timeout_s)

    def run(self, action: Callable[[], None], timeout_s: float) -> bool:
        """Runs `action` on the writing thread after pending writes. False after `timeout_s` or if it fails."""
        done = threading.Event()

        def act() -> None:
            action()
            done.set()

        with self._changed:
            self._operations.append(_Operation([], (), act))
            self._changed.notify_all()
        return done.wait(timeout_s)

    def drop_all(self) -> None:
        """Discards pending pages, except those being written now."""
        with self._changed:
            while self._operations:
                self._drop(self._operations.popleft())
            self._changed.notify_all()

    def close(self, timeout_s: float) -> bool:
        """Writes pending pages, then ends the thread. False if the thread still hangs after `timeout_s`.

        After four fifths of that time, pages whose write has not started are dropped.
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
        """Stops writing, and logs it, while one disk operation takes too long; queued pages are written later."""
        limit_s = _HANGING * self._patience_s
        if self._busy_s() > limit_s:
            self._health.lose(f"a write takes longer than {limit_s:g} s", Use.WRITING, is_late=True)

    def _busy_s(self) -> float:
        """Seconds since the start of the thread's current task, 0 while the thread is idle."""
        began_s = self._began_s
        return 0.0 if began_s is None else time.monotonic() - began_s

    def _wait_for_buffer(self, size: int) -> memoryview | None:
        """None: the disk is slower than pages arrive, and callers do not wait. A long queue is no sign of a hanging
        disk; only one long call is (`_notice_hanging`)."""
        buffer, waited_until_s = None, time.monotonic() + self._patience_s
        while buffer is None and self._health[Use.WRITING]:
            now = time.monotonic()
            left_s = min(waited_until_s - now, self._patience_s - self._busy_s())
            buffer = self._pool.take(size, max(0.0, left_s))
            if left_s <= 0 or time.monotonic() < now + left_s:  # an early None: the machine has no free memory
                break
        if buffer is None:
            self._notice_hanging()
        return buffer

    def _drop(self, operation: _Operation) -> None:
        """Call with the lock held."""
        self._counters.add("dropped", len(operation.pages))
        self._release(operation)

    def _release(self, operation: _Operation) -> None:
        """Call with the lock held."""
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
            if self._health.is_late(Use.WRITING):
                self._health.regain(Use.WRITING)

    def _look_after(self) -> None:
        try:
            self._keep()
        except Exception as error:
            logger.exception("cache: looking after the directory failed for a reason of our own")
            self._health.lose(error, Use.WRITING)

    def _perform(self, operation: _Operation) -> None:
        is_written = False
        try:
            if operation.action is not None:  # also while writing is stopped: clearing a full disk makes room
                operation.action()
                is_written = True
            elif self._health[Use.WRITING]:
                self._write(operation.pages, operation.chain)
                is_written = True
        except OSError as error:
            self._counters.add("write_errors")
            self._health.lose(error, Use.WRITING)
        except Exception as error:
            logger.exception("cache: writing failed for a reason of our own")
            self._health.lose(error, Use.WRITING)
        finally:
            with self._changed:
                self._release(operation) if is_written else self._drop(operation)
