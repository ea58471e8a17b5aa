"""Control of the operating system's page cache, which must not serve reads that measure the disk."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import psutil

_READING_BYTES = 4 << 20


def drop(*paths: Path) -> None:
    """Writes these files to the disk, then asks the system to drop them from the page cache."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def fill(*paths: Path) -> None:
    """Loads these files into the page cache, as far as memory allows."""
    for path in paths:
        with path.open("rb") as file:
            while file.read(_READING_BYTES):
                pass


def cached_share(*paths: Path) -> float | None:
    """The share of these files in the page cache, 0 to 1; None if the system does not report it (mincore(2))."""
    there = total = 0
    for path in paths:
        flags = _resident_pages(path)
        if flags is None:
            return None
        there, total = there + sum(flag & 1 for flag in flags), total + len(flags)
    return there / total if total else 0.0


def _resident_pages(path: Path) -> bytes | None:
    """One byte per memory page of the file; the lowest bit is set for a page in the page cache. None: unknown."""
    size = path.stat().st_size
    if size == 0:
        return b""
    flags = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapping:
        start = ctypes.c_char.from_buffer(mapping)
        failed = ctypes.CDLL(None).mincore(ctypes.byref(start), ctypes.c_size_t(size), flags)
        del start  # releases the buffer, so that the mapping can be closed
    return None if failed else flags.raw


def file_system(path: Path) -> str | None:
    """The type of `path`'s file system, such as "ext4" or "tmpfs" (files in memory); None if unknown."""
    try:
        mounts = psutil.disk_partitions(all=True)
    except OSError:
        return None
    resolved = path.resolve()
    around = [(len(mount.mountpoint), mount.fstype) for mount in mounts if resolved.is_relative_to(mount.mountpoint)]
    return max(around)[1] if around else None
