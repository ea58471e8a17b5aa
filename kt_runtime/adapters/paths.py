"""Names, paths and directories from outside, checked before use. Needs no torch.

An untrusted directory is opened once: only its regular files are read, each of them once. The bytes that are checked
are the bytes that are used: a file is opened without following links, its type and size come from the open descriptor,
and it is read whole. Replacing the file afterwards has no effect.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kt_runtime import spare
from kt_runtime.beside import PIECE_BYTES, pause
from kt_runtime.direct_file import BLOCK_BYTES, DIRECT_BYTES, DirectFile
from kt_runtime.errors import AdapterError, InvalidValueError, NotFoundError

# ASCII only: no look-alikes. No ":" (it separates base and adapter in `model`), no "/", no leading dot.
NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")


def check_adapter_name(name: str) -> str:
    """Returns `name`. Raises InvalidValueError unless it is valid in requests, file names and URLs alike."""
    if not isinstance(name, str) or not NAME_PATTERN.fullmatch(name):
        shown = name if len(str(name)) <= 160 else f"{str(name)[:160]}... ({len(str(name))} characters)"
        raise InvalidValueError(
            f"adapter name {shown!r}: expected 1 to 128 of the characters A-Z a-z 0-9 _ . -, beginning with a letter "
            "or digit"
        )
    return name


def confined(path: str | os.PathLike[str], root: str | os.PathLike[str]) -> Path:
    """`path`, relative to `root` unless absolute, if it lies below `root` with all symbolic links resolved.

    Raises InvalidValueError otherwise, and for an invalid path. The path need not exist. `%2e` and the like are
    ordinary characters here: the caller decodes URLs before.
    """
    text = os.fspath(path)
    if not text or "\0" in text or len(text) > 4096:
        raise InvalidValueError(f"path {text[:160]!r}: expected 1 to 4096 characters, none of them NUL")
    base = os.path.realpath(root)
    resolved = os.path.realpath(os.path.join(base, text))
    if resolved == base or os.path.commonpath([base, resolved]) != base:
        raise InvalidValueError(f"path {text!r} is not below {os.fspath(root)}")
    return Path(os.path.normpath(os.path.join(base, text)))


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

    def read(self, name: str, max_bytes: int) -> memoryview:
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


def _read_exactly(descriptor: int, size: int, where: Path) -> memoryview:
    """A large file is read past the system's page cache, where it is not in it: it is read once, and pages of gigabytes
    would push out what is used."""
    blocks = spare.array(-(-max(size, 1) // BLOCK_BYTES) * BLOCK_BYTES).data
    data, done = blocks[:size], 0
    with contextlib.closing(DirectFile(descriptor)) as direct:
        while done < size:
            pause()
            piece = slice(done, done + PIECE_BYTES)
            count = direct.read_into([blocks[piece]], done) if size >= DIRECT_BYTES else 0
            count = count or os.preadv(descriptor, [data[piece]], done)
            if not count:
                raise AdapterError(f"{where}: became shorter while it was read ({done} of {size} bytes)")
            done += count
    if done > size or os.pread(descriptor, 1, size):
        raise AdapterError(f"{where}: became longer while it was read (more than {size} bytes)")
    return data
