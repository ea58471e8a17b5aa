"""Allocates the files through which SGLang's processes share Prometheus metrics, so that a full disk does no harm.

`prometheus_client` (multiprocess mode) creates sparse files and writes them through a memory map. If the disk has no
space for a hole that is written to, the kernel ends the process with SIGBUS: a full /tmp would end the server, and the
training in it. So the files' full size is allocated as soon as a file is found.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)


class MetricsFiles:
    """`directory`: where the files are; None if there are none."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._taken_bytes: dict[str, int] = {}

    def take_room(self) -> None:
        """Allocates new files and files that have grown. Ignores failures of the disk or the file system."""
        if self._directory is None:
            return
        with contextlib.suppress(OSError):  # an ending process removes its files; the server must continue
            for entry in os.scandir(self._directory):
                size = entry.stat().st_size if entry.name.endswith(".db") else 0
                if size > self._taken_bytes.get(entry.name, 0) and _allocate(entry.path, size):
                    self._taken_bytes[entry.name] = size


def _allocate(path: str, size: int) -> bool:
    """fallocate(2). On a file system without it, `os.posix_fallocate` would write, racing with the file's owner."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return bool(_LIBC.fallocate(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(size)) == 0)
    finally:
        os.close(descriptor)
