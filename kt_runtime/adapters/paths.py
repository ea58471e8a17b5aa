"""Names, paths and directories from outside, checked before use. Needs no torch.

An untrusted directory is opened once: only its regular files are read, each of them once. The bytes that are checked
are the bytes that are used: a file is opened without following links, its type and size come from the open descriptor,
and it is read through that descriptor alone, whole or its header before its tensors. Replacing the file afterwards has
no effect.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kt_runtime import spare
from kt_runtime.beside import PIECE_BYTES, pause
from kt_runtime.direct_file import BLOCK_BYTES, DIRECT_BYTES, DirectFile
from kt_runtime.errors import AdapterError, InvalidValueError, NotFoundError
from kt_runtime.mapped import commit

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
        """The whole content of the regular file `name`, at most `max_bytes`. Raises as `open`."""
        with self.open(name, max_bytes) as file:
            return file.read()

    @contextlib.contextmanager
    def open(self, name: str, max_bytes: int) -> Iterator[OpenFile]:
        """The regular file `name`, of at most `max_bytes`. Raises AdapterError."""
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
            yield OpenFile(where, descriptor, status.st_size)
        finally:
            os.close(descriptor)


@dataclass(frozen=True)
class OpenFile:
    """`path` is for messages only. `size`: when the file was opened. The methods raise AdapterError if the file has
    another size when its bytes are read.

    A large file that is not in the system's page cache is read without it: the file is read once, and gigabytes of its
    pages would evict pages in use.
    """

    path: Path
    descriptor: int
    size: int

    def beginning(self, num_bytes: int) -> bytes:
        """The file's first bytes. `num_bytes` is at most `size`."""
        data = b""
        while len(data) < num_bytes:
            part = os.pread(self.descriptor, num_bytes - len(data), len(data))
            if not part:
                raise self._is_shorter(len(data))
            data += part
        return data

    def read(self) -> memoryview:
        """The whole content."""
        data, done = _blocks(self.size), 0
        with contextlib.closing(DirectFile(self.descriptor)) as direct:
            while done < self.size:
                done += self._read_into(data[done : done + PIECE_BYTES], done, direct)
        self.check_end()
        return data[: self.size]

    def spread(self, begin: int, end: int, targets: Iterable[np.ndarray]) -> None:
        """Fills `targets`, uint8, one after another with the bytes from `begin` to `end`, which are as many. On any
        thread. The caller calls `check_end`, once."""
        data = _blocks(min(end - begin // BLOCK_BYTES * BLOCK_BYTES, PIECE_BYTES))
        piece, done = np.frombuffer(data, np.uint8), begin // BLOCK_BYTES * BLOCK_BYTES
        used = piece[:0]
        with contextlib.closing(DirectFile(self.descriptor)) as direct:
            for target in targets:
                filled, address = 0, target.ctypes.data
                while filled < len(target):
                    if not len(used):
                        count = self._read_into(data[: _whole_blocks(end - done)], done, direct)
                        used, done = piece[max(0, begin - done) : count], done + count
                        continue
                    count = min(len(target) - filled, len(used))
                    commit(address + filled, count)
                    target[filled : filled + count] = used[:count]
                    filled, used = filled + count, used[count:]

    def _read_into(self, blocks: memoryview, done: int, direct: DirectFile) -> int:
        """Reads bytes from offset `done`, a multiple of the block size: as many as `blocks` take or fewer, at least
        one."""
        pause()
        count = direct.read_into([blocks], done) if self.size >= DIRECT_BYTES else 0
        count = count or os.preadv(self.descriptor, [blocks], done)
        if not count:
            raise self._is_shorter(done)
        return count

    def check_end(self) -> None:
        """Raises AdapterError if the file has grown. Call it after the last byte was read."""
        if os.pread(self.descriptor, 1, self.size):
            raise AdapterError(f"{self.path}: became longer while it was read (more than {self.size} bytes)")

    def _is_shorter(self, done: int) -> AdapterError:
        return AdapterError(f"{self.path}: became shorter while it was read ({done} of {self.size} bytes)")


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


def _blocks(num_bytes: int) -> memoryview:
    """Memory for so many bytes, rounded up to whole blocks."""
    return spare.array(_whole_blocks(max(num_bytes, 1))).data


def _whole_blocks(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES
