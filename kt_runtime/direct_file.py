"""Reads and writes that bypass the system's page cache (O_DIRECT, Linux), of data that is not in it.

Pages that nobody reads again take no memory. Gigabytes of them would evict pages in use, or be freed later, for which a
virtual machine may stop (`spare.py`). Without support by the file system, files are read and written as usual.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Sequence

DIRECT_BYTES = 32 << 20
"""Smallest file for which bypassing the page cache pays."""
BLOCK_BYTES = 4096  # a multiple of the alignment that disks and file systems require
_WRITTEN_BYTES = 2 << 20  # bytes of one write
_MOST_CACHED = 0.5  # share of the bytes; above it, most of the work is a copy from memory
_CACHESTAT = 451  # system call, the same number on x86-64 and 64-bit Arm; Linux 6.5
_REFUSALS = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOENT}  # the last: a system without /proc
_NO_FILES_LEFT = {errno.EMFILE, errno.ENFILE}
_LIBC = ctypes.CDLL(None)


def cached_share(descriptor: int, offset: int, size: int) -> float | None:
    """The share (0 to 1) of that range of the file in the page cache; None where the system does not report it."""
    if not hasattr(_LIBC, "syscall"):
        return None
    part = (ctypes.c_uint64 * 2)(offset, size)
    counts = (ctypes.c_uint64 * 5)()  # in memory pages; the first is the number of cached ones
    if _LIBC.syscall(ctypes.c_long(_CACHESTAT), ctypes.c_int(descriptor), part, counts, ctypes.c_uint(0)):
        return None
    return int(counts[0]) * mmap.PAGESIZE / size


class DirectFile:
    """Direct reads of a file, for data outside the page cache only, since memory is faster than a disk.

    Offset, lengths and addresses must be multiples of the block size. Without support by the file system nothing is
    read, and the caller reads as usual.

    Has a second descriptor of an open file, opened on first use. Thread-safe.
    """

    def __init__(self, descriptor: int) -> None:
        self._buffered = descriptor
        self._descriptor: int | None = None
        self._is_refused = False
        self._opening = threading.Lock()

    def read_into(self, views: Sequence[memoryview], offset: int) -> int:
        """Fills the first of `views` and returns the number of bytes read: all, or fewer at the end of the file, or 0
        if they are in the page cache or O_DIRECT fails."""
        if self._is_refused:
            return 0
        share = cached_share(self._buffered, offset, sum(len(view) for view in views))
        if share is None or share > _MOST_CACHED:
            return 0
        try:
            return os.preadv(self._open(), views, offset)
        except OSError as error:
            if error.errno in _NO_FILES_LEFT:
                return 0
            if error.errno in _REFUSALS:
                self._is_refused = True
                return 0
            raise

    def _open(self) -> int:
        with self._opening:
            if self._descriptor is None:
                self._descriptor = _opened(self._buffered, os.O_RDONLY)
            return self._descriptor

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)


class DirectWriter:
    """Writes a file from its beginning. A context: at its end the file is whole, if there was no error.

    `descriptor`: of an empty file, open for writing. Not thread-safe.
    """

    def __init__(self, descriptor: int) -> None:
        self._buffered, self._direct = descriptor, -1
        self._blocks = mmap.mmap(-1, _WRITTEN_BYTES)  # at a page, as O_DIRECT needs it
        self._filled = self._written = 0

    def write(self, data: memoryview) -> None:
        """`data`: contiguous."""
        data = data.cast("B")
        while data:
            count = min(len(data), _WRITTEN_BYTES - self._filled)
            self._blocks[self._filled : self._filled + count] = data[:count]
            self._filled, data = self._filled + count, data[count:]
            if self._filled == _WRITTEN_BYTES:
                self._flush()

    def __enter__(self) -> DirectWriter:
        with contextlib.suppress(OSError):
            self._direct = _opened(self._buffered, os.O_WRONLY)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._flush()
        finally:
            self._end_direct()

    def _flush(self) -> None:
        with memoryview(self._blocks) as blocks:
            done = 0
            while done < self._filled:
                part, place = blocks[done : self._filled], self._written + done
                whole = len(part) // BLOCK_BYTES * BLOCK_BYTES
                if self._direct >= 0 and whole and place % BLOCK_BYTES == 0:
                    try:
                        done += os.pwrite(self._direct, part[:whole], place)
                        continue
                    except OSError as error:
                        if error.errno not in _REFUSALS:
                            raise
                        self._end_direct()
                done += os.pwrite(self._buffered, part, place)
        self._filled, self._written = 0, self._written + done

    def _end_direct(self) -> None:
        if self._direct >= 0:
            os.close(self._direct)
            self._direct = -1


def _opened(descriptor: int, flags: int) -> int:
    """The same file once more, past the page cache."""
    return os.open(f"/proc/self/fd/{descriptor}", flags | getattr(os, "O_DIRECT", 0) | os.O_CLOEXEC)
