"""Faults in a real server's processes: `install` changes the process that calls it, and its forks.

KILLED_AT names a file. While it exists, a process is killed (SIGKILL) before it opens a file of the name in it.
JUMPED_CLOCK names a file: the seconds in it are added to the wall clock (`time.time`, `time.time_ns`), as when somebody
sets the machine's clock. The monotonic clock goes on.
NO_MEMORY names a file. While it exists, the scheduler's process gets NO_MEMORY_ROOM_BYTES beside what it uses: neither
from the system nor from what the allocator keeps of freed memory. The process writes FILLED to the file when it is so.
COUNTED_MEMORY names a directory: what `counted_memory` asks the scheduler and the frontend for.
LEAK names a directory. While a file `scheduler` or `frontend` is in it, that process keeps LEAK_BYTES for each request.
"""

from __future__ import annotations

import ctypes
import functools
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

KILLED_AT = "KILLED_AT"
JUMPED_CLOCK = "JUMPED_CLOCK"
NO_MEMORY, FILLED = "NO_MEMORY", "filled"
NO_MEMORY_ROOM_BYTES = 4 << 20  # Python takes a MiB at a time for its small objects


COUNTED_MEMORY = "COUNTED_MEMORY"
COUNTED = ("scheduler", "frontend")
LEAK, LEAK_BYTES = "LEAK", 65536


def install() -> None:
    if os.environ.get(KILLED_AT):
        sys.addaudithook(_kill_at)
    if os.environ.get(JUMPED_CLOCK):
        _follow_the_clock(Path(os.environ[JUMPED_CLOCK]))
    if os.environ.get(NO_MEMORY):
        _take_memory(Path(os.environ[NO_MEMORY]))
    if os.environ.get(COUNTED_MEMORY):
        _count_memory(Path(os.environ[COUNTED_MEMORY]))
    if os.environ.get(LEAK):
        _leak(Path(os.environ[LEAK]))


def _kill_at(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "open" or not isinstance(arguments[0], str):
        return
    control = os.environ.get(KILLED_AT, "")
    if arguments[0] != control and os.path.exists(control) and arguments[0].rpartition("/")[2] == _content(control):
        os.kill(os.getpid(), signal.SIGKILL)


_open = os.open  # as it is before `faulty_disk` changes it, which opens a file of its own


def _content(path: str) -> str:
    """Its own opening of the file calls the audit hook, which leaves it alone."""
    descriptor = _open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, 200).decode()
    finally:
        os.close(descriptor)


def _follow_the_clock(control: Path) -> None:
    wall, wall_ns = time.time, time.time_ns

    def jumped_s() -> int:
        try:
            return int(_content(str(control)) or 0)
        except FileNotFoundError:
            return 0

    time.time = lambda: wall() + jumped_s()
    time.time_ns = lambda: wall_ns() + jumped_s() * 10**9


def _take_memory(control: Path) -> None:
    """On the scheduler's thread, between two receptions of requests."""
    import psutil
    from sglang.srt.managers.scheduler import Scheduler

    libc = ctypes.CDLL(None)
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    ingest_requests, limits = Scheduler.ingest_requests, resource.getrlimit(resource.RLIMIT_AS)
    taken: list[int] = []  # blocks that nobody writes to: addresses alone

    def take() -> None:
        used = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_AS, (used, limits[1]))
        for size in (1 << power for power in range(26, 15, -1)):
            while block := libc.malloc(size):
                taken.append(block)
        resource.setrlimit(resource.RLIMIT_AS, (used + NO_MEMORY_ROOM_BYTES, limits[1]))

    def give_back() -> None:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        while taken:
            libc.free(taken.pop())

    def with_less(self: Any, *args: Any, **kwargs: Any) -> Any:
        if control.exists() != bool(taken):
            if taken:
                give_back()
            else:
                take()
                control.write_text(FILLED)
        return ingest_requests(self, *args, **kwargs)

    Scheduler.ingest_requests = with_less  # type: ignore[method-assign]


_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _Mallinfo2(ctypes.Structure):
    """mallinfo(3): bytes, of all arenas."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _FIELDS.split())


def allocated_bytes() -> int:
    """That this process has from malloc, in arenas and mapped alone."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Mallinfo2
    found = mallinfo2()
    return int(found.uordblks + found.hblkhd)


def _count_memory(directory: Path) -> None:
    """Twice a second in the frontend, between two receptions of requests in the scheduler.

    The paths are made once: `pathlib` interns each part of a path, and in Python's table of interned strings one that
    comes and goes takes a new place each time, until the table moves to 8 MB more.
    """
    from sglang.srt.managers.scheduler import Scheduler

    from kt_runtime.sglang_patch.frontend.stalls import Stalls

    ingest_requests, check = Scheduler.ingest_requests, Stalls.check

    def answers(process: str) -> Callable[[], None]:
        asked, new, answered = (directory / name for name in (f"{process}.asked", f"{process}.new", process))

        def answer() -> None:
            if asked.exists():
                asked.unlink()
                new.write_text(str(allocated_bytes()))
                new.rename(answered)

        return answer

    answer_in_scheduler, answer_in_frontend = map(answers, COUNTED)

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        answer_in_scheduler()
        return ingest_requests(self, *args, **kwargs)

    def counting_in_the_loop(self: Stalls) -> None:
        answer_in_frontend()
        check(self)

    Scheduler.ingest_requests = counting  # type: ignore[method-assign]
    Stalls.check = counting_in_the_loop  # type: ignore[method-assign]


def counted_memory(directory: Path, wait: Callable[[Callable[[], bool]], None]) -> dict[str, int]:
    """`allocated_bytes` of the scheduler and the frontend of a server that was started with this COUNTED_MEMORY.

    `wait`: for a condition. An idle scheduler answers when a request comes.
    """
    for process in COUNTED:
        (directory / process).unlink(missing_ok=True)
        (directory / f"{process}.asked").touch()
    wait(lambda: all((directory / process).exists() for process in COUNTED))
    return {process: int((directory / process).read_text()) for process in COUNTED}


def _leak(directory: Path) -> None:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    kept: list[bytearray] = []

    def leaking(process: str, handle: Callable[..., Any]) -> Callable[..., Any]:
        told = directory / process

        @functools.wraps(handle)
        def keep(*args: Any, **kwargs: Any) -> Any:
            if told.exists():
                kept.append(bytearray(b"x") * LEAK_BYTES)
            return handle(*args, **kwargs)

        return keep

    for process, owner, name in (
        ("scheduler", Scheduler, "handle_generate_request"),
        ("frontend", TokenizerManager, "generate_request"),
    ):
        setattr(owner, name, leaking(process, getattr(owner, name)))
