"""A file system in memory that forgets what was not synced, and fails, tears or waits when it is told to."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kt_runtime.cache.page import Page
from kt_runtime.errors import ConflictError


class Crash(Exception):
    """The process is gone: nothing after this point happens."""


class MemoryFile:
    def __init__(self) -> None:
        self.data = bytearray()
        self.synced = b""


class FaultyFiles:
    """`before(operation, path)` runs before every operation and may raise, wait or count.
    `tear_at`: that write (counted from 0) writes only half of its bytes and then raises Crash or an OSError.
    """

    def __init__(self) -> None:
        self.files: dict[Path, MemoryFile] = {}
        self.durable: dict[Path, MemoryFile] = {}
        self.directories: dict[Path, int] = {}
        self.before: Callable[[str, Path], None] = lambda operation, path: None
        self.tear_at: int | None = None
        self.tear_error: BaseException = Crash()
        self.num_writes = 0
        self.locks: set[Path] = set()
        self._next_inode = 1

    # FileSystem

    def make_directory(self, path: Path) -> None:
        self.before("make_directory", path)
        for one in reversed([path, *path.parents]):
            if one not in self.directories:
                self.directories[one] = self._inode()

    def identity(self, path: Path) -> tuple[int, int]:
        self.before("identity", path)
        if path in self.directories:
            return 1, self.directories[path]
        if path in self.files:
            return 1, id(self.files[path])
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))

    def names(self, path: Path) -> list[str]:
        self.before("names", path)
        if path not in self.directories:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        return [one.name for one in (*self.files, *self.directories) if one.parent == path]

    def open(self, path: Path, *, write: bool = False, create: bool = False) -> OpenMemoryFile:
        self.before("open", path)
        if path not in self.files:
            if not create or path.parent not in self.directories:
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
            self.files[path] = MemoryFile()
        return OpenMemoryFile(self, path, self.files[path])

    def remove(self, path: Path) -> None:
        self.before("remove", path)
        del self.files[path]
        self.durable.pop(path, None)

    def rename(self, old: Path, new: Path) -> None:
        self.before("rename", old)
        self.files[new] = self.files.pop(old)
        self.durable.pop(old, None)

    def sync_directory(self, path: Path) -> None:
        self.before("sync_directory", path)
        for one, file in self.files.items():
            if one.parent == path:
                self.durable[one] = file
        for one in list(self.durable):
            if one.parent == path and one not in self.files:
                del self.durable[one]

    @contextlib.contextmanager
    def lock(self, path: Path, purpose: str) -> Iterator[None]:
        self.before("lock", path)
        if path in self.locks:
            raise ConflictError(f"{path}: {purpose} is in use by process 1")
        self.files.setdefault(path, MemoryFile())
        self.locks.add(path)
        try:
            yield
        finally:
            self.locks.discard(path)

    def lock_holder(self, path: Path) -> str | None:
        return "1" if path in self.locks else None

    # What a test does

    def power_cut(self) -> None:
        """Only what was synced is left. A file whose name was never synced is gone."""
        self.files = {}
        for path, file in self.durable.items():
            kept = MemoryFile()
            kept.data[:] = file.synced
            kept.synced = file.synced
            self.files[path] = kept
        self.durable = dict(self.files)
        self.locks.clear()

    def kill(self) -> None:
        """The process is gone, the machine is not: all that was written is there."""
        self.locks.clear()
        self.before = lambda operation, path: None
        self.tear_at = None

    def remove_tree(self, path: Path) -> None:
        """Files that are open stay in existence for who has them open."""
        for one in [one for one in self.files if path in one.parents]:
            del self.files[one]
        for one in [one for one in self.directories if one == path or path in one.parents]:
            del self.directories[one]

    def used_bytes(self, path: Path) -> int:
        return sum(len(file.data) for one, file in self.files.items() if path in one.parents)

    def _inode(self) -> int:
        self._next_inode += 1
        return self._next_inode


class OpenMemoryFile:
    def __init__(self, system: FaultyFiles, path: Path, file: MemoryFile) -> None:
        self._system, self._path, self._file = system, path, file
        self._is_open = True

    def read_into(self, pieces: Sequence[bytearray | memoryview], offset: int) -> int:
        assert self._is_open
        self._system.before("read", self._path)
        done = 0
        for piece in pieces:
            found = self._file.data[offset + done : offset + done + len(piece)]
            memoryview(piece)[: len(found)] = found
            done += len(found)
        return done

    def write_from(self, pieces: Sequence[bytes | bytearray | memoryview], offset: int) -> None:
        assert self._is_open
        self._system.before("write", self._path)
        data = b"".join(bytes(piece) for piece in pieces)
        torn = self._system.num_writes == self._system.tear_at
        self._system.num_writes += 1
        if torn:
            data = data[: len(data) // 2]
        if len(self._file.data) < offset:
            self._file.data.extend(bytes(offset - len(self._file.data)))
        self._file.data[offset : offset + len(data)] = data
        if torn:
            raise self._system.tear_error

    def sync(self) -> None:
        assert self._is_open
        self._system.before("sync", self._path)
        self._file.synced = bytes(self._file.data)

    def size(self) -> int:
        return len(self._file.data)

    def truncate(self, size: int) -> None:
        self._system.before("write", self._path)
        del self._file.data[size:]

    def close(self) -> None:
        self._is_open = False


def key_of(number: int) -> bytes:
    return f"page-{number}".encode()


def payload_of(number: int, size: int = 4096) -> bytes:
    seed = number.to_bytes(8, "little")
    return (seed * (size // 8 + 1))[:size]


def page_to_write(number: int, size: int = 4096) -> Page:
    half = size // 2
    data = bytearray(payload_of(number, size))
    return Page(key_of(number), [memoryview(data)[:half], memoryview(data)[half:]])


def page_to_read(number: int, size: int = 4096) -> Page:
    half = size // 2
    return Page(key_of(number), [bytearray(half), bytearray(size - half)])


def contents(page: Page) -> bytes:
    return b"".join(bytes(piece) for piece in page.pieces)


class Fail:
    """As `FaultyFiles.before`: raises `error` for these operations while it is on. `raised`: how often it did."""

    def __init__(self, number: int, *operations: str) -> None:
        self.error = OSError(number, os.strerror(number))
        self.operations = operations
        self.is_on, self.raised = True, 0

    def __call__(self, operation: str, path: Path) -> None:
        if self.is_on and operation in self.operations:
            self.raised += 1
            raise self.error


HANG_SECONDS = 30.0


class Hang:
    """As `FaultyFiles.before`: these operations wait until `release`. `begun`, `ended`: how many began and ended."""

    def __init__(self, *operations: str) -> None:
        self.operations = operations
        self.begun = self.ended = 0
        self.released = threading.Event()

    def __call__(self, operation: str, path: Path) -> None:
        if operation in self.operations:
            self.begun += 1
            self.released.wait(HANG_SECONDS)
            self.ended += 1

    def release(self) -> None:
        self.released.set()
