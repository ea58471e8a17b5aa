"""An untrusted directory, opened once: only its regular files are read, each of them once.

The bytes that are checked are the bytes that are used: a file is opened without following links, its type and size come
from the open descriptor, and it is read whole. Replacing the file afterwards has no effect.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kt_runtime.errors import AdapterError, NotFoundError

_LARGEST_READ_BYTES = 1 << 30


@dataclass(frozen=True)
class OpenDirectory:
    """`path` is for messages only; all access goes through `descriptor`."""

    path: Path
    descriptor: int

    def file_names(self) -> list[str]:
        """Names of the regular files. Subdirectories are skipped; links and special files raise AdapterError."""
        names = []
        with os.scandir(self.descriptor) as entries:
            for entry in entries:
                if entry.is_symlink():
                    raise AdapterError(f"{self.path}: {entry.name!r} is a symbolic link; expected regular files only")
                if entry.is_file(follow_symlinks=False):
                    names.append(entry.name)
                elif not entry.is_dir(follow_symlinks=False):
                    raise AdapterError(f"{self.path}: {entry.name!r} is not a regular file (a pipe, socket or device)")
        return sorted(names)

    def read(self, name: str, max_bytes: int) -> bytearray:
        """The whole content of the regular file `name`, at most `max_bytes`. Raises AdapterError."""
        where = self.path / name
        try:
            descriptor = os.open(
                name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self.descriptor
            )
        except OSError as error:
            raise AdapterError(f"{where}: can't be opened: {error.strerror}") from None
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                kind = "a directory" if stat.S_ISDIR(status.st_mode) else "a pipe, socket or device"
                raise AdapterError(f"{where}: is {kind}; expected a regular file")
            if status.st_size > max_bytes:
                raise AdapterError(f"{where}: has {status.st_size} bytes; at most {max_bytes} are accepted")
            return _read_exactly(descriptor, status.st_size, where)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def open_directory(path: str | os.PathLike[str]) -> Iterator[OpenDirectory]:
    """Opens `path`, which must be a directory and not a symbolic link. Raises NotFoundError or AdapterError."""
    place = Path(path)
    try:
        descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise NotFoundError(f"{place}: there is no such directory") from None
    except (OSError, ValueError) as error:
        if os.path.islink(place):
            raise AdapterError(f"{place}: is a symbolic link; expected a directory") from None
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise AdapterError(f"{str(place)[:200]!r}: can't be opened as a directory: {reason}") from None
    try:
        yield OpenDirectory(place, descriptor)
    finally:
        os.close(descriptor)


def _read_exactly(descriptor: int, size: int, where: Path) -> bytearray:
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        count = os.readv(descriptor, [view[done : done + _LARGEST_READ_BYTES]])
        if not count:
            raise AdapterError(f"{where}: became shorter while it was read ({done} of {size} bytes)")
        done += count
    if os.read(descriptor, 1):
        raise AdapterError(f"{where}: became longer while it was read (more than {size} bytes)")
    return data
