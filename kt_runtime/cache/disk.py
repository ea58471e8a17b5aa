"""The disk: all file access of the disk tier, whether reading and writing work, and counters of what was done.

Tests replace the file system by one that loses or tears writes, fails or hangs. Methods raise OSError as the system
calls that they wrap. Large reads of data outside the system's page cache bypass that cache (`kt_runtime.direct_file`).
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import logging
import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

from kt_runtime.direct_file import BLOCK_BYTES, DirectFile
from kt_runtime.files import exclusive_lock, fsync_directory, lock_holder

logger = logging.getLogger(__name__)

DISK_COUNTERS = (
    "hits",  # pages read and valid
    "misses",  # pages requested and not delivered, for whatever reason
    "bytes_read",  # payload of the hits
    "bytes_written",  # payload of the records written
    "records_written",
    "evictions",  # records removed to keep the quota
    "cleared",  # records removed on request
    "corrupt",  # records that did not match the index; each is a miss too
    "dropped",  # pages offered and not written: no memory, a failing disk, or too large
    "read_errors",  # reads that failed with an OSError
    "write_errors",
    "late",  # reads abandoned because the disk took too long
    "read_ahead",  # prefetched pages: reading began before the request
)

_MOST_PIECES = 1024  # IOV_MAX on Linux: more pieces need another call
_LARGE_WRITE = 256 << 10
_SMALLEST_DIRECT_READ = 256 << 10
_LIBC = ctypes.CDLL(None)

Buffer: TypeAlias = bytes | bytearray | memoryview


class OpenFile(Protocol):
    def read_into(self, pieces: Sequence[bytearray | memoryview], offset: int) -> int:
        """Fills `pieces` in order from `offset`; returns the number of bytes read (fewer at the end of the file)."""

    def write_from(self, pieces: Sequence[Buffer], offset: int) -> None:
        """Writes `pieces` in order from `offset`. After an OSError any part of them may have been written."""

    def sync(self) -> None:
        """Returns when all earlier writes are durable (survive a power cut)."""

    def size(self) -> int: ...

    def truncate(self, size: int) -> None: ...

    def close(self) -> None: ...


class FileSystem(Protocol):
    def make_directory(self, path: Path) -> None:
        """Creates `path` and its parents, accessible to the owner only; an existing directory is kept."""

    def identity(self, path: Path) -> tuple[int, int]:
        """Device and inode, which differ for a new directory under the same name."""

    def names(self, path: Path) -> list[str]: ...

    def open(self, path: Path, *, write: bool = False, create: bool = False) -> OpenFile: ...

    def remove(self, path: Path) -> None: ...

    def rename(self, old: Path, new: Path) -> None:
        """Replaces `new` if it exists."""

    def sync_directory(self, path: Path) -> None: ...

    def lock(self, path: Path, purpose: str) -> contextlib.AbstractContextManager[None]:
        """Raises ConflictError, naming the process that holds the lock, if another one does."""

    def lock_holder(self, path: Path) -> str | None:
        """The process that holds the lock, or None."""


class _DiskFile:
    """Serialises reads through the page cache: the system prefetches for a sequential reader, and threads that read
    neighbouring places at the same time are slower than one. Direct reads (O_DIRECT) run in parallel."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._reading = threading.Lock()
        self._direct = DirectFile(descriptor)

    def read_into(self, pieces: Sequence[bytearray | memoryview], offset: int) -> int:
        views = [memoryview(piece).cast("B") for piece in pieces if len(piece)]
        # The rest is read as usual; there is none except at the end of the file, or where direct reading fails.
        done = self._direct.read_into(views[:_MOST_PIECES], offset) if is_eligible(views, offset) else 0
        views = _rest(views, done)
        with self._reading:
            while views:
                count = os.preadv(self._descriptor, views[:_MOST_PIECES], offset + done)
                if count == 0:
                    break
                done += count
                views = _rest(views, count)
        return done

    def write_from(self, pieces: Sequence[Buffer], offset: int) -> None:
        views = [memoryview(piece).cast("B") for piece in pieces if len(piece)]
        start = offset
        while views:
            count = os.pwritev(self._descriptor, views[:_MOST_PIECES], offset)
            offset += count
            views = _rest(views, count)
        if offset - start >= _LARGE_WRITE:
            _begin_writing_back(self._descriptor, start, offset - start)

    def sync(self) -> None:
        os.fdatasync(self._descriptor)

    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def truncate(self, size: int) -> None:
        os.ftruncate(self._descriptor, size)

    def close(self) -> None:
        os.close(self._descriptor)
        self._direct.close()


def _begin_writing_back(descriptor: int, offset: int, size: int) -> None:
    """Starts writing back, so that the disk works while the next pages are prepared and `sync` finds little left to do.
    Linux only (sync_file_range(2)). Errors are ignored here; `sync` reports them."""
    begin = getattr(_LIBC, "sync_file_range", None)
    if begin is not None:
        write = 2  # SYNC_FILE_RANGE_WRITE: start, don't wait
        begin(descriptor, ctypes.c_int64(offset), ctypes.c_int64(size), write)


def _rest(views: list[memoryview], count: int) -> list[memoryview]:
    """`views` without their first `count` bytes."""
    for position, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[position + 1 :]]
        count -= len(view)
    return []


class DiskFiles:
    """The real file system."""

    def make_directory(self, path: Path) -> None:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def identity(self, path: Path) -> tuple[int, int]:
        status = os.stat(path)
        return status.st_dev, status.st_ino

    def names(self, path: Path) -> list[str]:
        return os.listdir(path)

    def open(self, path: Path, *, write: bool = False, create: bool = False) -> OpenFile:
        flags = (os.O_RDWR if write else os.O_RDONLY) | (os.O_CREAT if create else 0) | os.O_CLOEXEC | os.O_NOFOLLOW
        return _DiskFile(os.open(path, flags, 0o600))

    def remove(self, path: Path) -> None:
        os.unlink(path)

    def rename(self, old: Path, new: Path) -> None:
        os.replace(old, new)

    def sync_directory(self, path: Path) -> None:
        fsync_directory(path)

    def lock(self, path: Path, purpose: str) -> contextlib.AbstractContextManager[None]:
        return exclusive_lock(path, purpose)

    def lock_holder(self, path: Path) -> str | None:
        return lock_holder(path)


def is_eligible(views: Sequence[memoryview], offset: int) -> bool:
    """Whether offset and lengths are whole blocks, and enough of them. The system itself refuses unaligned memory."""
    size = sum(len(view) for view in views)
    return (
        size >= _SMALLEST_DIRECT_READ
        and offset % BLOCK_BYTES == 0
        and not any(len(view) % BLOCK_BYTES for view in views)
    )


class Use(enum.Enum):
    READING = "reading from"
    WRITING = "writing to"


class Health:
    """Whether the disk is usable, for reading and for writing separately. Logs one line per failure and per recovery.

    `where` is for messages. Thread-safe.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._lock = threading.Lock()
        self._reasons: dict[Use, str] = {}
        self._late: set[Use] = set()

    def __getitem__(self, use: Use) -> bool:
        return use not in self._reasons

    def reason(self, use: Use) -> str | None:
        """Why `use` is stopped; None while it works."""
        return self._reasons.get(use)

    def is_late(self, use: Use) -> bool:
        """True if `use` is stopped because a call hangs; it works again once that call has returned."""
        return use in self._late

    def lose(self, reason: object, *uses: Use, is_late: bool = False) -> None:
        """Stops `uses`: the cache runs without them until `regain`. A hanging call (`is_late`) leaves a stopped use as
        it is; another reason replaces a hanging call, whose return is then no recovery."""
        with self._lock:
            lost = [use for use in uses if use not in self._reasons]
            self._reasons |= dict.fromkeys(uses if not is_late else lost, str(reason))
            self._late = self._late | set(lost) if is_late else self._late - set(uses)
        if lost:
            what = " and ".join(use.value for use in lost)
            logger.warning("cache: %s %s stopped, serving continues without it: %s", what, self._where, reason)

    def regain(self, *uses: Use) -> None:
        with self._lock:
            back = [use for use in uses if self._reasons.pop(use, None) is not None]
            self._late -= set(uses)
        if back:
            logger.info("cache: %s %s works again", " and ".join(use.value for use in back), self._where)


class Counters:
    """Counts of a tier since the server began. One lock: several threads count."""

    def __init__(self, names: Iterable[str] = DISK_COUNTERS) -> None:
        self._lock = threading.Lock()
        self._values = dict.fromkeys(names, 0)

    def add(self, name: str, count: int = 1) -> None:
        with self._lock:
            self._values[name] += count

    def __getitem__(self, name: str) -> int:
        with self._lock:
            return self._values[name]

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return dict(self._values)
