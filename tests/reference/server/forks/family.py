"""All processes that descend from this one, servers included: forks of its fork server (system/forked_server.py).

The fork server itself may be a fork of one that another process of pytest has started. `shares` says so.
"""

from __future__ import annotations

import contextlib

import psutil

_shared: tuple[int, int] | None = None


def shares(imported: int, own: int) -> None:
    """`imported`: the process that the fork servers of several processes are forks of; `own`: this process's."""
    global _shared
    _shared = imported, own


def processes() -> set[psutil.Process]:
    """What descends from this process or from its fork server, and not from another process's fork server."""
    found = set(psutil.Process().children(recursive=True))
    if _shared is None:
        return found
    imported, own = _shared
    with contextlib.suppress(psutil.NoSuchProcess):  # it ends with the process that started it
        for other in psutil.Process(imported).children():
            if other.pid != own:
                found -= {other, *_children(other)}
    return found | {psutil.Process(own), *_children(psutil.Process(own))}


def _children(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.children(recursive=True)
    return []
