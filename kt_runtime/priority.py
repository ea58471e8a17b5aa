"""Which of a process's threads come first on busy processors (sched(7), sched_setattr(2)).

A decode step waits for the slowest of its threads, one on each processor, some hundred times. A thread that works on an
adapter meanwhile would take far more of the processors than its niceness says: where it keeps one of the step's threads
waiting, the others have nothing to do, and it takes their processors, too. Linux leaves it there until its slice of
time has passed, milliseconds each time.

So the engine's threads ask for the shortest slices (`come_first`): since Linux 6.12 a thread that wakes takes the
processor from one with longer slices at once. Earlier systems ignore that.

And each of them has a processor of its own. The pool's workers are pinned (csrc/threads/pool.h); a calling thread that
is not may come to share a worker's processor, where each waits for the other half of the time, while the thread that
gives way has the calling thread's processor whole, whatever its niceness. So a batch is computed `on_processor`. Also
where nothing gives way: a step of one stream takes 14 ms then, and 16 otherwise. But where other programs keep that
processor busy, the thread waits for it beside a free one: three servers on two processors took 151 s for what took 131
without. So a thread that often waits has its `OwnProcessor` no more, for some time.
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
"""The shortest that Linux accepts."""
NICENESS = 10
"""What threads that give way add to the process's: a tenth of a busy processor's time."""

MOST_WAITED = 0.25
"""Of a batch's time, that its thread waits for its own processor at most, on average of about `AVERAGED` batches."""
AVERAGED = 16
FREE_BATCHES = 256
"""On any processor, after the thread has waited for its own."""

_TASKS = Path("/proc/self/task")
_SET_ATTRIBUTES = {"x86_64": 314, "aarch64": 274}.get(platform.machine())
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")
"""struct sched_attr: size, policy, flags, niceness, priority; runtime, deadline, period in ns."""


def come_first(thread: int, slice_ns: int = SHORT_SLICE_NS) -> bool:
    """Gives a thread of this process, by its system id, short slices; its niceness stays. False: not possible here.

    Threads that it starts have them, too. `slice_ns` 0: the system's own slices.
    """
    if _SET_ATTRIBUTES is None:
        return False
    with contextlib.suppress(OSError):
        niceness = os.getpriority(os.PRIO_PROCESS, thread)
        attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, 0, niceness, 0, slice_ns, 0, 0)
        return ctypes.CDLL(None).syscall(_SET_ATTRIBUTES, thread, attributes, 0) == 0
    return False


def give_way(thread: int | None = None) -> None:
    """From now on a thread of this process (None: this one), and those that it starts, get less of a busy processor
    than the process's others.

    There is no way back without privileges (setpriority(2); Linux counts by thread).
    """
    thread = threading.get_native_id() if thread is None else thread
    with contextlib.suppress(OSError):
        wanted = min(19, os.getpriority(os.PRIO_PROCESS, os.getpid()) + NICENESS)
        if wanted > os.getpriority(os.PRIO_PROCESS, thread):
            os.setpriority(os.PRIO_PROCESS, thread, wanted)
    come_first(thread, 0)


@contextlib.contextmanager
def on_processor(processor: int | None) -> Iterator[None]:
    """This thread runs on that processor in the block, if the system lets it; None: on any.

    Threads that it starts meanwhile stay there: it must start none.
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
    """Where a thread computes its batches: on `processor`, unless other programs keep it busy. None: on any.

    One thread calls `batch`. `clock`: seconds. `waited`: seconds that the calling thread has waited for a processor,
    since it began; None where the system does not say, and then `processor` is kept.
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
        """`has_work_beside`: threads of this process work that give way, so this one stays on its processor."""
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
    """How long a thread was ready to run and had no processor: the second number of its schedstat (proc(5))."""

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
