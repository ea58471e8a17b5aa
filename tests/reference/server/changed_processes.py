"""Faults in a real server's processes: `install` changes the process that calls it, and its forks.

KILLED_AT names a file. While it exists, a process is killed (SIGKILL) before it opens a file of the name in it.
JUMPED_CLOCK names a file: the seconds in it are added to the wall clock (`time.time`, `time.time_ns`), as when somebody
sets the machine's clock. The monotonic clock goes on.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

KILLED_AT = "KILLED_AT"
JUMPED_CLOCK = "JUMPED_CLOCK"


def install() -> None:
    if os.environ.get(KILLED_AT):
        sys.addaudithook(_kill_at)
    if os.environ.get(JUMPED_CLOCK):
        _follow_the_clock(Path(os.environ[JUMPED_CLOCK]))


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
