"""The files through which SGLang's processes share Prometheus's metrics, made safe against a full disk.

`prometheus_client` (multiprocess mode) makes them with holes and writes through a memory map. Where the disk has no
room for a hole that is written to, the kernel ends the process with SIGBUS: a full /tmp would end the server, and the
training in it. So the room that the files claim is taken as soon as they are seen.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)


class MetricsFiles:
    """`directory`: None, there are none."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._taken_bytes: dict[str, int] = {}

    def take_room(self) -> None:
        """For files that are new or have grown. Where the disk or the file system can't do it, nothing happens."""
        if self._directory is None:
            return
        with contextlib.suppress(OSError):  # a process that ends takes its files with it; the server must go on
            for entry in os.scandir(self._directory):
                size = entry.stat().st_size if entry.name.endswith(".db") else 0
                if size > self._taken_bytes.get(entry.name, 0) and _allocate(entry.path, size):
                    self._taken_bytes[entry.name] = size


def _allocate(path: str, size: int) -> bool:
    """fallocate(2). `os.posix_fallocate` would write where a file system can't do it, against the file's owner."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return bool(_LIBC.fallocate(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(size)) == 0)
    finally:
        os.close(descriptor)
