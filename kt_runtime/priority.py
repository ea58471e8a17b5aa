"""Priority of a process's threads on busy cores (sched(7), sched_setattr(2)).

A decode step has one thread on each core, and its threads synchronise some hundred times, each time with the slowest. A
background thread that works on an adapter meanwhile would get much more CPU time than its niceness suggests. While it
delays one of the step's threads, the others are idle, and background threads get their cores, too. Linux lets a thread
run until its time slice ends, which takes milliseconds each time.

So the engine's threads ask for the shortest time slices (`come_first`). Since Linux 6.12 a thread that wakes preempts
one with longer slices at once. Earlier systems ignore the request.

Each of the engine's threads also has its own core. The pool's workers are pinned (csrc/threads/pool.h). If the thread
that calls them were not pinned, it might share a worker's core: each would then wait half of the time, while a
background thread has the calling thread's core to itself, whatever its niceness. So a batch is computed `on_processor`.
This helps without background threads, too: a step of one stream takes 14 ms instead of 16. If other programs keep that
core busy, however, the pinned thread waits although another core is free: three servers on two cores took 151 s instead
of 131 s. So a thread that often waits gives up its `OwnProcessor` for some time.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

SHORT_SLICE_NS = 100_000
"""The shortest time slice that Linux accepts."""
NICENESS = 10
"""Niceness of background threads above the process's: they get a tenth of a busy core's time."""

MOST_WAITED = 0.25
"""Largest share of a batch's time that its thread may wait for its own core: a running mean over about `AVERAGED`
batches."""
AVERAGED = 16
FREE_BATCHES = 256
"""Number of batches that the thread computes on any core once it has waited too long for its own."""

_TASKS = Path("/proc/self/task")
_SET_ATTRIBUTES = {"x86_64": 314, "aarch64": 274}.get(platform.machine())
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")
"""struct sched_attr: size, policy, flags, niceness, priority; runtime, deadline, period in ns."""


def come_first(thread: int, slice_ns: int = SHORT_SLICE_NS) -> bool:
    """Gives a thread of this process (its system id) short time slices and keeps its niceness. False: not possible
    here.

    Threads that it starts inherit them. `slice_ns` 0: the system's default slices.
    """
    if _SET_ATTRIBUTES is None:
        return False
    with contextlib.suppress(OSError):
        niceness = os.getpriority(os.PRIO_PROCESS, thread)
        attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, 0, niceness, 0, slice_ns, 0, 0)
        return ctypes.CDLL(None).syscall(_SET_ATTRIBUTES, thread, attributes, 0) == 0
    return False


def give_way(thread: int | None = None) -> None:
    """Lowers the priority of a thread of this process (None: this one) and of those that it starts: on a busy core they
    get less time than the process's other threads.

    Only a privileged process can raise it again (setpriority(2); in Linux each thread has its own niceness).
    """
    thread = threading.get_native_id() if thread is None else thread
    with contextlib.suppress(OSError):
        wanted = min(19, os.getpriority(os.PRIO_PROCESS, os.getpid()) + NICENESS)
        if wanted > os.getpriority(os.PRIO_PROCESS, thread):
            os.setpriority(os.PRIO_PROCESS, thread, wanted)
    come_first(thread, 0)


@contextlib.contextmanager
def on_processor(processor: int | None) -> Iterator[None]:
    """Pins this thread to that processor inside the context, if the system allows it; None: to none.

    A thread that it started meanwhile would inherit the pinning for good, so it must start none.
    """
    before: set[int] | None = None
    if processor is not None and hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):
            allowed = os.sched_getaffinity(0)
            os.sched_setaffinity(0, {processor})
            before = allowed
    try:
        yield
    finally:
        if before is not None:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, before)


class OwnProcessor:
    """The processor on which a thread computes its batches: `processor`, unless other programs keep it busy. None: any.

    One thread calls `batch`. `clock`: seconds. `waited`: seconds that the calling thread has waited for a processor,
    since the thread began; None if the system does not report it: `processor` is then kept.
    """

    def __init__(
        self,
        processor: int | None,
        clock: Callable[[], float] = time.monotonic,
        waited: Callable[[], float | None] | None = None,
    ) -> None:
        self._processor, self._clock = processor, clock
        self._waited = waited or RunQueue().seconds
        self._share, self._free = 0.0, 0

    @contextlib.contextmanager
    def batch(self, *, has_work_beside: bool) -> Iterator[None]:
        """`has_work_beside`: background threads of this process are working, so this thread stays on its processor."""
        if self._free and not has_work_beside:
            self._free -= 1
            yield
            return
        began, before = self._clock(), self._waited()
        with on_processor(self._processor):
            yield
        after = self._waited()
        if before is None or after is None or self._processor is None:
            return
        share = (after - before) / max(self._clock() - began, 1e-9)
        self._share += (min(share, 1.0) - self._share) / AVERAGED
        if self._share > MOST_WAITED:
            self._share, self._free = MOST_WAITED / 2, FREE_BATCHES


class RunQueue:
    """Seconds for which a thread was ready to run but had no core: the second number of its schedstat (proc(5))."""

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def seconds(self) -> float | None:
        try:
            if not hasattr(self._of_thread, "file"):
                self._of_thread.file = open("/proc/thread-self/schedstat", "rb", buffering=0)  # noqa: SIM115 - kept
            return int(os.pread(self._of_thread.file.fileno(), 100, 0).split()[1]) / 1e9
        except (OSError, IndexError, ValueError):
            return None


def threads_by_name() -> dict[int, str]:
    """The threads of this process, by their system ids."""
    found = {}
    for task in _TASKS.iterdir():
        with contextlib.suppress(OSError):
            found[int(task.name)] = (task / "comm").read_text().strip()
    return found
