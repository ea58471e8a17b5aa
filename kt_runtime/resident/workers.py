"""Worker threads for long work outside the engine's thread: reading, checking, hashing, converting, writing.

The engine's thread submits a function under a key and later takes its result. Only a few functions run at once, to
bound memory: each may hold an adapter twice.

**A hanging file system** (a dead network mount) blocks a thread in the kernel, and nothing can interrupt this thread.
A hanging thread uses no processor time; a slow one does, since it copies the data that it reads. So a watch thread
checks how long ago each thread last used processor time:

- after `STALL_SECONDS` the thread no longer counts against `num_threads`, so another function may begin;
- after `patience_s` the function fails with a RequestTimeoutError. The thread is lost, and its result is dropped;
- `max_threads` bounds all threads, lost ones included. If all are lost, waiting functions fail too. A lost thread ends
  when its file system answers again, which frees its place.

PyTorch's operations in a function run on its thread alone: OpenMP's threads would spin on the engine's processors
(`without_openmp`).

**On an accelerator** a function's work goes to the stream that was current where it was begun. So its tensors belong to
the engine's stream: memory that the engine frees there is given to a function in the order of that stream, not before
the engine's queued work has read it.

The threads are daemons, so lost threads do not keep the process from exiting.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from kt_runtime import device
from kt_runtime.adapters.tensors import without_openmp
from kt_runtime.beside import BATCHES
from kt_runtime.errors import KtError, RequestTimeoutError, RuntimeFault

logger = logging.getLogger(__name__)

NUM_THREADS, MAX_THREADS = 2, 8
STALL_SECONDS, PATIENCE_SECONDS = 2.0, 60.0
LOOK_SECONDS = 0.5

Ended = Callable[[str, Exception | None], None]
"""Called with a job's key and its error or None, on any thread but the engine's."""


def _current_stream() -> torch.Stream | None:
    kind = device.accelerator()
    return None if kind is None else device.current_stream(kind)


@dataclass(eq=False)
class _Job:
    """`ran_at`: when the thread last made progress. `cpu_clock`: the thread's CPU clock (pthread_getcpuclockid(3))."""

    key: str
    what: str
    make: Callable[[], Any] | None
    result: Future[Any] = field(default_factory=Future)
    ran_at: float = 0.0
    cpu_clock: int | None = None
    cpu_seconds: float = -1.0
    stream: torch.Stream | None = field(default_factory=_current_stream)

    def in_its_stream(self) -> AbstractContextManager[None]:
        return nullcontext() if self.stream is None else device.on(self.stream)

    def look(self, now: float) -> None:
        if self.cpu_clock is None:
            return
        try:
            seconds = time.clock_gettime(self.cpu_clock)
        except OSError:  # the thread has just ended
            return
        if seconds != self.cpu_seconds:
            self.cpu_seconds, self.ran_at = seconds, now


class Workers:
    """`ended(key, error)` is called once for each `begin` that was not given up, when `take` will not block.

    `name`: prefix of the threads' names. Call `begin`, `take`, `give_up`, `finish` and `close` on the engine's thread.
    """

    def __init__(
        self,
        name: str,
        ended: Ended,
        *,
        num_threads: int = NUM_THREADS,
        max_threads: int = MAX_THREADS,
        patience_s: float = PATIENCE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name, self._ended, self._clock = name, ended, clock
        self._num_threads, self._max_threads, self._patience_s = num_threads, max_threads, patience_s
        self._jobs: dict[str, _Job] = {}
        self._waiting: deque[_Job] = deque()
        self._running: list[_Job] = []
        self._changed = threading.Condition()
        self._closed = False
        self._num_started = 0
        self._watch: threading.Thread | None = None

    def begin(self, key: str, what: str, make: Callable[[], Any]) -> None:
        """Queues `make` under `key`. `what`: the path or session that the function is for, for messages."""
        job = _Job(key, what, make)
        with self._changed:
            self._jobs[key] = job
            if self._closed:
                job.result.set_exception(RuntimeFault(f"{what}: the server is shutting down"))
                return
            self._waiting.append(job)
            self._start_due()
            if self._watch is None:
                self._watch = threading.Thread(target=self._watch_threads, name=f"{self._name}-watch", daemon=True)
                self._watch.start()
            self._changed.notify_all()

    def take(self, key: str) -> Any:
        """The function's result, or its error raised. Blocks only if this rank is slower than rank 0, which reported
        the function's end."""
        try:
            # The job keeps its place until then: the result of one without a place is dropped.
            return self._jobs[key].result.result()
        finally:
            self._jobs.pop(key, None)

    def has_ended(self, key: str) -> bool:
        return self._jobs[key].result.done()

    def give_up(self, key: str) -> None:
        """Drops the job: a waiting function is removed, a running one completes unseen. An unknown key is ignored."""
        with self._changed:
            job = self._jobs.pop(key, None)
            if job is not None and job in self._waiting:
                self._waiting.remove(job)

    def finish(self, timeout_s: float) -> bool:
        """Waits until no function waits or runs; False after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._running, timeout_s)

    def close(self) -> None:
        """Starts no further function, and does not wait for running ones."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()

    def look(self) -> None:
        """Detects hanging functions, fails those past `patience_s`, and starts waiting functions in their place."""
        with self._changed:
            now = self._clock()
            for job in self._running:
                job.look(now)
            self._start_due()
            lost = [job for job in self._running if now - job.ran_at >= self._patience_s]
            failed = [(job, self._hangs(job)) for job in lost]
            if len(lost) >= self._max_threads:
                failed += [(job, self._no_threads(job, lost)) for job in self._waiting]
                self._waiting.clear()
            failed = [(job, error) for job, error in failed if self._settle(job, None, error)]
        for job, error in failed:
            self._ended(job.key, error)

    # On the threads.

    def _watch_threads(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._running)
                if self._closed:
                    return
            try:
                self.look()
            except Exception:  # the watch must survive: without it a hanging file system would go unnoticed
                logger.exception("%s: unexpected error; the watch continues", self._name)
            time.sleep(LOOK_SECONDS)

    def _run(self, job: _Job) -> None:
        job.cpu_clock = time.pthread_getcpuclockid(threading.get_ident())
        without_openmp()
        make, job.make = job.make, None
        assert make is not None
        value: Any = None
        error: Exception | None = None
        try:
            with job.in_its_stream():
                value = make()
        except Exception as problem:
            error = problem
            if not isinstance(problem, KtError):
                logger.error("%s: unexpected error", job.what, exc_info=problem)
        with self._changed:
            self._running.remove(job)
            must_notify = self._settle(job, value, error)
            self._start_due()
            self._changed.notify_all()
        if must_notify:
            self._ended(job.key, error)
        BATCHES.ended()  # not before its end can be seen

    # With the lock.

    def _start_due(self) -> None:
        now = self._clock()
        active = sum(now - job.ran_at < STALL_SECONDS for job in self._running)
        while self._waiting and not self._closed and active < self._num_threads:
            if len(self._running) >= self._max_threads:
                return
            job = self._waiting.popleft()
            job.ran_at = now
            self._running.append(job)
            self._num_started += 1
            active += 1
            name = f"{self._name}-{self._num_started}"
            threading.Thread(target=self._run, args=(job,), name=name, daemon=True).start()

    def _settle(self, job: _Job, value: Any, error: Exception | None) -> bool:
        """Sets the job's result. Returns whether `ended` must be called."""
        if job.result.done() or self._jobs.get(job.key) is not job:
            return False
        if error is None:
            job.result.set_result(value)
        else:
            job.result.set_exception(error)
        return True

    def _hangs(self, job: _Job) -> RequestTimeoutError:
        return RequestTimeoutError(
            f"{job.what}: the file system has not answered for {self._patience_s:g} s (a network mount that is gone, "
            "or a dead disk); the server waits no longer. The operation may still complete"
        )

    def _no_threads(self, job: _Job, lost: list[_Job]) -> RequestTimeoutError:
        return RequestTimeoutError(
            f"{job.what}: not begun: {len(lost)} threads wait for file systems that do not answer, and there are no "
            f"more: {'; '.join(other.what for other in lost)}"
        )
