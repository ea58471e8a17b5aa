"""Threads that prefetch pages into buffers of their own.

A read never targets the caller's memory: a read may hang for longer than the caller waits, and would then write into
memory that has another owner. The copy from our buffer costs little beside the disk.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kt_runtime.cache.disk import Counters, Health, Use
from kt_runtime.cache.format import slot_bytes_for
from kt_runtime.cache.page import BufferPool, Page, page_in_slot

logger = logging.getLogger(__name__)

_JOB_BYTES = 8 << 20
_FAILURES = 3  # consecutive failed reads that stop reading until one works

Check: TypeAlias = Callable[[], list[bool]]


@dataclass
class _Entry:
    """One page in flight. `buffer` returns to the pool when no caller waits for the page and no thread reads it."""

    page: Page
    buffer: memoryview
    is_done: bool = False
    hit: bool = False
    is_given_up: bool = False
    job: _Job | None = None


@dataclass
class _Job:
    """`began_s`: start of the reading, or of the checking; None while the job waits for either."""

    entries: list[_Entry]
    began_s: float | None = None
    was_begun: bool = False


class ReadAhead:
    """`fetch` reads pages from the disk, may raise OSError, and returns a callable for the rest, which needs no disk:
    finding out which of them are valid. All pages have `page_bytes`.

    Some threads only fetch, and another one checks: a disk that idles during checksums is slower by a fifth. A job
    counts as running until it is checked: quarantining a damaged record may hang as well.

    The disk hangs when a job takes longer than `patience_s` (for 8 MiB; proportionally longer for a larger page). The
    time counts from the job's start: a healthy disk with a long queue is waited for.
    """

    def __init__(
        self,
        fetch: Callable[[Sequence[Page]], Check],
        page_bytes: int,
        *,
        memory_bytes: int,
        num_threads: int,
        patience_s: float,
        health: Health,
        counters: Counters,
    ) -> None:
        self._fetch, self._page_bytes = fetch, page_bytes
        self._patience_s = patience_s * max(1.0, page_bytes / _JOB_BYTES)
        self._health, self._counters = health, counters
        self._slot_bytes = slot_bytes_for(page_bytes)
        self._pool = BufferPool(max(memory_bytes, self._slot_bytes))
        self._pages_per_job = max(1, _JOB_BYTES // page_bytes)
        self._changed = threading.Condition()
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # not yet requested by `take`
        self._queued: deque[_Job] = deque()
        self._running: list[_Job] = []  # started, not yet checked
        self._reading: list[_Job] = []  # the ones of `_running` that a thread is reading now
        self._checking: _Job | None = None
        self._num_threads, self._num_finished = num_threads, 0
        self._fetched: deque[tuple[_Job, Check, Exception | None]] = deque()
        self._failures = 0
        self._is_closed = False
        names = (f"cache-read-{number}" for number in range(num_threads))
        self._threads = [threading.Thread(target=self._work, name=name, daemon=True) for name in names]
        self._threads.append(threading.Thread(target=self._work_on_fetched, name="cache-check", daemon=True))
        for thread in self._threads:
            thread.start()

    def start(self, keys: Sequence[bytes]) -> int:
        """Starts to read `keys`, as far as memory allows; returns how many of them are in flight. Never waits."""
        if not self._health[Use.READING]:
            return 0
        count, fresh, wanted = 0, list[_Entry](), set(keys)
        with self._changed:
            if self._is_closed:
                return 0
            for key in keys:
                if key not in self._entries:
                    buffer = self._buffer(wanted)
                    if buffer is None:
                        break
                    self._entries[key] = _Entry(page_in_slot(key, buffer, self._page_bytes), buffer)
                    fresh.append(self._entries[key])
                count += 1
            step = self._pages_per_job
            for first in range(0, len(fresh), step):
                job = _Job(fresh[first : first + step])
                for entry in job.entries:
                    entry.job = job
                self._queued.append(job)
            self._changed.notify_all()
        return count

    def take(self, pages: Sequence[Page], limit_s: float = math.inf) -> list[bool]:
        """Fills the valid pages, up to the first that is not valid: later ones are useless without it.

        Waits unless the disk hangs; gives up a page whose read has not started within `limit_s`.
        """
        keys = [page.key for page in pages]
        results = [False] * len(pages)
        deadline = time.monotonic() + limit_s
        for position, page in enumerate(pages):
            if time.monotonic() > deadline:
                break
            if position % self._pages_per_job == 0:
                self.start(keys[position:])
            entry = self._entry(keys[position:], deadline)
            if entry is None or not self._wait(entry, deadline):
                break
            if entry.hit:
                page.fill(memoryview(entry.page.pieces[0]))
            self._pool.give_back(entry.buffer)
            if not entry.hit:
                break
            results[position] = True
        else:
            return results
        self.forget(keys)
        return results

    def forget(self, keys: Sequence[bytes]) -> None:
        """Cancels the prefetch of `keys`."""
        with self._changed:
            for key in keys:
                entry = self._entries.pop(key, None)
                if entry is not None:
                    self._give_up(entry)

    def close(self, timeout_s: float) -> bool:
        """False if a read still hangs after `timeout_s`; its thread ends when the read does."""
        with self._changed:
            self._is_closed = True
            self._fail_queued()
            self._changed.notify_all()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _entry(self, keys: Sequence[bytes], deadline: float) -> _Entry | None:
        """The entry of the first of `keys`, once it is in flight; None if no memory is free for it by `deadline`.

        Also None if no read ends within `patience_s`: then the jobs that hold the memory hang.
        """
        finished, ended_s = self._num_finished, time.monotonic()
        while self._health[Use.READING] and not self._is_closed:
            with self._changed:
                entry = self._entries.pop(keys[0], None)
            if entry is not None:
                return entry
            now = time.monotonic()
            if finished != self._num_finished:
                finished, ended_s = self._num_finished, now
            if now > deadline or now - ended_s > self._patience_s:
                return None
            if not self.start(keys):
                with self._changed:
                    self._changed.wait(0.1 * self._patience_s)  # reads of other callers hold the memory
        return None

    def _buffer(self, wanted: set[bytes]) -> memoryview | None:
        """Call with the lock held. Frees finished pages that no caller took, the oldest first, if memory is short."""
        buffer = self._pool.take(self._slot_bytes)
        while buffer is None:
            others = (entry for key, entry in self._entries.items() if entry.is_done and key not in wanted)
            unclaimed = next(others, None)
            if unclaimed is None:
                return None
            self._give_up(self._entries.pop(unclaimed.page.key))
            buffer = self._pool.take(self._slot_bytes)
        return buffer

    def _give_up(self, entry: _Entry) -> None:
        """Call with the lock held."""
        entry.is_given_up = True
        if entry.is_done:
            self._pool.give_back(entry.buffer)

    def _wait(self, entry: _Entry, deadline: float) -> bool:
        """False if the page is given up. A hanging disk is not used again before its reads have returned."""
        job = entry.job
        assert job is not None
        with self._changed:
            while not entry.is_done:
                now = time.monotonic()
                is_hanging = self._is_overdue(job, now) if job.began_s is not None else self._hangs()
                if is_hanging or (now > deadline and not job.was_begun):
                    break
                self._changed.wait(self._until_next_look(now, deadline))
            else:
                return True
            self._give_up(entry)
            if is_hanging:  # the thread that finishes the last running job ends this state
                self._fail_queued()
                reason = f"a read takes longer than {self._patience_s:g} s"
                self._health.lose(reason, Use.READING, is_late=True)
        self._counters.add("late")
        return False

    def _until_next_look(self, now: float, deadline: float) -> float:
        """Call with the lock held. Seconds until a job may become overdue or the deadline passes."""
        times = [job.began_s + self._patience_s for job in self._running if job.began_s is not None]
        times += [deadline] if deadline > now else []
        return max(0.001, min([self._patience_s, *(at - now for at in times)]))

    def _hangs(self) -> bool:
        """Call with the lock held. True if the queue is stuck: all reading threads or the checking one are overdue."""
        now = time.monotonic()
        reading = [job for job in self._reading if self._is_overdue(job, now)]
        is_checking_late = self._checking is not None and self._is_overdue(self._checking, now)
        return is_checking_late or len(reading) == self._num_threads

    def _fail_queued(self) -> None:
        """Call with the lock held."""
        while self._queued:
            self._finish(self._queued.popleft(), [])

    def _finish(self, job: _Job, hits: list[bool]) -> None:
        """Call with the lock held."""
        self._num_finished += 1
        for position, entry in enumerate(job.entries):
            entry.is_done = True
            entry.hit = position < len(hits) and hits[position]
            if entry.is_given_up:
                self._pool.give_back(entry.buffer)
        self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queued or self._is_closed)
                if not self._queued:
                    return
                job = self._queued.popleft()
                job.began_s, job.was_begun = time.monotonic(), True
                self._running.append(job)
                self._reading.append(job)
            check, error = self._fetch_job(job)
            with self._changed:
                job.began_s = None
                self._reading.remove(job)
                self._fetched.append((job, check, error))
                self._changed.notify_all()

    def _work_on_fetched(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._fetched or (self._is_closed and not self._running))
                if not self._fetched:
                    return
                job, check, error = self._fetched.popleft()
                job.began_s = time.monotonic()
                self._checking = job
            hits, failure = self._check(check)
            error = error or failure
            with self._changed:
                self._running.remove(job)
                self._checking = None
                self._finish(job, hits)
                self._failures = self._failures + 1 if error else 0
                is_overdue = any(self._is_overdue(other, time.monotonic()) for other in self._running)
            ends_waiting = not is_overdue and self._health.is_late(Use.READING)
            if self._failures >= _FAILURES or (error and ends_waiting):
                self._health.lose(error, Use.READING)
            elif ends_waiting and not error:
                self._health.regain(Use.READING)

    def _check(self, check: Check) -> tuple[list[bool], Exception | None]:
        try:
            return check(), None
        except Exception as error:
            logger.exception("cache: checking failed for a reason of our own; the pages count as missing")
            return [], error

    def _fetch_job(self, job: _Job) -> tuple[Check, Exception | None]:
        pages = [entry.page for entry in job.entries if not entry.is_given_up]
        try:
            check = self._fetch(pages)
        except OSError as error:
            return list, error
        except Exception as error:
            logger.exception("cache: reading failed for a reason of our own; the pages count as missing")
            return list, error
        wanted = {page.key for page in pages}

        def check_all() -> list[bool]:
            found = iter(check())
            return [entry.page.key in wanted and next(found) for entry in job.entries]

        return check_all, None

    def _is_overdue(self, job: _Job, now: float) -> bool:
        return job.began_s is not None and now - job.began_s > self._patience_s

    def was_refused(self) -> bool:
        """True while reading is stopped because reads failed; the owner must probe the disk to start reading again."""
        return not self._health[Use.READING] and not self._health.is_late(Use.READING)

    def forget_failures(self) -> None:
        self._failures = 0
