"""Atomic, durable writes: write under a temporary name, fsync, rename, fsync the directory.

A reader sees either the old file or the new file, whole, also after a crash or `kill -9`. Temporary names start with
`TEMPORARY_PREFIX`; code that lists a directory skips them, and `remove_unfinished` removes those that a crash left.

Bounded reads of untrusted files: only regular files, never more than a given number of bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Collection, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

from kt_runtime.errors import ConflictError, InvalidValueError, KtError, NumericsError, RuntimeFault

TEMPORARY_PREFIX = ".tmp-"
LINE_CHARACTERS = 118  # of compact JSON


MayReplace = Callable[[Path, Path], None]
"""Called with a directory and its name for messages; raises ConflictError if the directory must not be replaced."""


_OF_THE_MACHINE = (errno.EIO, errno.ENOMEM, errno.EMFILE, errno.ENFILE)


@contextlib.contextmanager
def errors_of_path(path: Path, deed: str) -> Iterator[None]:
    """Turns an OSError about a path that a user chose (missing, forbidden, too long, disk full) into InvalidValueError,
    and a failure of the machine (`_OF_THE_MACHINE`) into RuntimeFault. `deed`: "written" or "read", for messages."""
    try:
        yield
    except KtError:
        raise
    except OSError as error:
        kind = RuntimeFault if error.errno in _OF_THE_MACHINE else InvalidValueError
        shown = str(path) if len(str(path)) <= 300 else f"{str(path)[:300]}... ({len(str(path))} characters)"
        raise kind(f"{shown}: can't be {deed}: {error.strerror or error}") from None


@contextlib.contextmanager
def open_regular(path: Path) -> Iterator[int]:
    """Yields a read-only descriptor of the regular file at `path`; follows symbolic links.

    Never blocks, unlike a plain open of a pipe without a writer. Raises OSError, also for any non-regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise OSError(errno.EISDIR, "is a directory; expected a regular file", str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "is a pipe, socket or device; expected a regular file", str(path))
        yield descriptor
    finally:
        os.close(descriptor)


def empty_buffer(size_bytes: int) -> memoryview:
    """Memory with arbitrary contents, the target of a read.

    `bytearray(size_bytes)` writes zeros while it holds the GIL, 0.1 s per 50 MB: every stream of a server waits.
    """
    import numpy as np  # imported here, since most commands read no such file

    return np.empty(size_bytes, np.uint8).data


def read_at(descriptor: int, count: int, offset: int) -> bytes:
    """`count` bytes from `offset` on; fewer only at the end of the file. Raises OSError."""
    parts = []
    while count > 0 and (part := os.pread(descriptor, count, offset)):
        parts.append(part)
        count -= len(part)
        offset += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def read_regular(path: Path, max_bytes: int) -> bytes:
    """The whole content of the regular file at `path`. Raises OSError, ValueError for more than `max_bytes`."""
    with open_regular(path) as descriptor:
        size_bytes = os.fstat(descriptor).st_size
        if size_bytes > max_bytes:
            raise ValueError(f"has {size_bytes} bytes; at most {max_bytes} are read")
        return read_at(descriptor, size_bytes, 0)


def parse_json(text: bytes) -> Any:
    """Parses JSON in UTF-8. Accepts NaN and Infinity, since Python's json writes them into config files.

    Raises ValueError, also for a name that appears twice in an object and for a lone surrogate.
    """

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members: dict[str, Any] = {}
        for name, value in pairs:
            if name in members:
                raise ValueError(f"the name {name[:80]!r} appears twice in an object")
            members[name] = value
        return members

    try:
        value = json.loads(text.decode(), object_pairs_hook=without_duplicates)
        if b"\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value


def fsync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, data: bytes, *, private: bool = False) -> None:
    """Replaces `path` with `data`, atomically and durably. The parent directory must exist.

    `private`: only the owner may read it (mode 0600).
    """
    descriptor, temporary = tempfile.mkstemp(prefix=TEMPORARY_PREFIX, dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o600 if private else 0o644)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    fsync_directory(path.parent)


def write_json(path: Path, value: Any, *, private: bool = False) -> None:
    """`write_file` with `value` as JSON. Raises NumericsError for NaN and infinity, which JSON can't represent."""
    try:
        text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise NumericsError(f"{path}: not written, since a value in it is no number: {error}") from None
    write_file(path, f"{text}\n".encode(), private=private)


def compact_json(value: Any, indent: int = 0) -> str:
    """JSON in which a list or object that fits into a line is one line, so that a table's row is a line."""
    if isinstance(value, Decimal):
        return str(value)
    if not isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, dict):
        items, ends = [f"{json.dumps(key)}: {compact_json(item, indent + 2)}" for key, item in value.items()], "{}"
    else:
        items, ends = [compact_json(item, indent + 2) for item in value], "[]"
    line = ends[0] + ", ".join(items) + ends[1]
    if len(line) + indent <= LINE_CHARACTERS and "\n" not in line:
        return line
    inner = ",\n".join(" " * (indent + 2) + item for item in items)
    return f"{ends[0]}\n{inner}\n{' ' * indent}{ends[1]}"


def write_new_file(path: Path, fill: Callable[[Path], None]) -> None:
    """Calls `fill(temporary)` to write a file, then names the file `path` atomically.

    Raises ConflictError if `path` exists. Creates a missing parent directory.
    """
    if os.path.lexists(path):
        raise ConflictError(f"{path} exists already; choose another name")
    path.parent.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX, dir=path.parent))
    try:
        temporary = directory / path.name
        fill(temporary)
        with temporary.open("rb") as opened:
            os.fsync(opened.fileno())
        try:
            os.link(temporary, path)  # unlike a rename, never replaces
        except FileExistsError:
            raise ConflictError(f"{path} was created by somebody else meanwhile; choose another name") from None
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS) or path.exists():
                raise
            temporary.rename(path)  # a file system without hard links
        fsync_directory(path.parent)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def write_directory(
    path: Path, fill: Callable[[Path], None], *, replace: MayReplace | None = None, private: bool = False
) -> None:
    """Calls `fill(temporary)` to write files, then moves the whole directory to `path`.

    `private`: only the owner may enter the directory and read its files (modes 0700 and 0600).

    If `path` exists, `replace` must be given: it approves the old directory, then old and new are exchanged atomically
    and the old one is removed. Raises ConflictError if `path` exists without `replace`, and whatever `replace` raises;
    in both cases nothing is removed.
    """
    if os.path.lexists(path) and replace is None:
        raise ConflictError(f"{path} exists already; choose another name, or remove it")
    if os.path.lexists(path) and (path.is_symlink() or not path.is_dir()):
        raise ConflictError(f"{path} is not a directory, so it is not replaced by one; choose another name")
    if replace is not None and path.exists():
        replace(path, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX, dir=path.parent))
    try:
        fill(temporary)
        for entry in temporary.rglob("*"):
            if entry.is_file():
                if private:
                    os.chmod(entry, 0o600)
                with entry.open("rb") as opened:
                    os.fsync(opened.fileno())
            else:
                fsync_directory(entry)
        os.chmod(temporary, 0o700 if private else 0o755)
        fsync_directory(temporary)
        if replace is not None and path.exists():
            _exchange(temporary, path)
            try:
                replace(temporary, path)  # checked again: files may have been added to the old directory meanwhile
            except BaseException:
                _exchange(temporary, path)
                raise
        else:
            _rename_to_new(temporary, path)
        fsync_directory(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def only_files(names: re.Pattern[str], marks: Collection[str], what: str) -> MayReplace:
    """A `MayReplace` that approves two kinds of directories: empty ones, and those that hold only regular files whose
    names match `names`, including every name in `marks`. `what`: the writer of such directories, for messages."""

    def check(directory: Path, shown: Path) -> None:
        found = set()
        with os.scandir(directory) as entries:
            for entry in entries:
                found.add(entry.name)
                if not entry.is_file(follow_symlinks=False) or not names.fullmatch(entry.name):
                    raise ConflictError(
                        f"{shown}: not replaced: it holds {entry.name[:80]!r}, which {what} does not write; "
                        "choose another name"
                    )
        missing = sorted(set(marks) - found) if found else []
        if missing:
            raise ConflictError(
                f"{shown}: not replaced: it has no {missing[0]}, so {what} did not write it; choose another name"
            )

    return check


def move_directory(source: Path, path: Path) -> None:
    """Renames directory `source`, whose content is already synced, to `path` atomically. Removes an older entry at
    `path` afterwards; of a symbolic link, only the link. Both paths must have the same parent."""
    if os.path.lexists(path):
        _exchange(source, path)
        fsync_directory(path.parent)
        if source.is_dir() and not source.is_symlink():
            shutil.rmtree(source)
        else:
            source.unlink()
    else:
        _rename_to_new(source, path)
    fsync_directory(path.parent)


def _rename_to_new(temporary: Path, path: Path) -> None:
    try:
        os.rename(temporary, path)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise ConflictError(f"{path} was created by somebody else meanwhile; choose another name") from None
        raise


def _exchange(first: Path, second: Path) -> None:
    """Swaps two names atomically: renameat2(2) with RENAME_EXCHANGE, which Python does not offer."""
    at_working_directory, rename_exchange = -100, 2
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(
        at_working_directory, os.fsencode(first), at_working_directory, os.fsencode(second), rename_exchange
    ):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(first), None, str(second))


def visible_entries(directory: Path) -> list[Path]:
    """The non-temporary entries of `directory`, sorted by name; empty if the directory does not exist."""
    if not directory.is_dir():
        return []
    return sorted(entry for entry in directory.iterdir() if not entry.name.startswith(TEMPORARY_PREFIX))


def remove_unfinished(root: Path) -> list[str]:
    """Removes temporary entries in `root` and in its directories; returns a message for each that can't be removed.

    Two levels deep, as directories of adapter versions are. Never call it while another thread or process writes there.
    Does nothing if `root` does not exist.
    """
    problems: list[str] = []
    for directory in [root, *_subdirectories(root, problems)]:
        for entry in _entries_of(directory, problems):
            if entry.name.startswith(TEMPORARY_PREFIX):
                _remove_entry(entry, problems)
    return problems


def _remove_entry(entry: Path, problems: list[str]) -> None:
    def refused(_: object, path: str, error: tuple[object, BaseException, object]) -> None:
        problems.append(_unremovable(path, error[1]))

    try:
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, onerror=refused)
        else:
            entry.unlink(missing_ok=True)
    except OSError as error:
        problems.append(_unremovable(str(entry), error))


def _unremovable(path: str, error: BaseException) -> str:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else error
    return f"{path}: left half written by an earlier server, and can't be removed: {reason}"


def _subdirectories(root: Path, problems: list[str]) -> list[Path]:
    return [
        entry for entry in _entries_of(root, problems) if not entry.name.startswith(TEMPORARY_PREFIX) and entry.is_dir()
    ]


def _entries_of(directory: Path, problems: list[str]) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        problem = f"{directory}: can't be read: {error.strerror or error}"
        if problem not in problems:
            problems.append(problem)
        return []


@contextlib.contextmanager
def exclusive_lock(path: Path, purpose: str) -> Iterator[None]:
    """Holds an advisory lock on `path` (created if missing). Raises ConflictError at once if another process holds it.

    The kernel releases the lock when the process ends, however that happens: there are no stale locks. A process that
    this one forks does not hold the lock.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    _LOCKS.add(descriptor)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            raise ConflictError(f"{path}: {purpose} is in use by process {holder}") from None
        with contextlib.suppress(OSError):  # on a full disk the holder's id is not recorded; the lock holds anyway
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        if descriptor in _LOCKS:  # not in a fork, which has closed it
            _LOCKS.remove(descriptor)
            os.close(descriptor)


_LOCKS: set[int] = set()
"""Descriptors of the locks of this process."""


def _close_locks() -> None:
    """In a fork: the parent's descriptors would keep its locks after the parent has ended."""
    for descriptor in _LOCKS:
        os.close(descriptor)
    _LOCKS.clear()


os.register_at_fork(after_in_child=_close_locks)


def lock_holder(path: Path) -> str | None:
    """The process id that holds `exclusive_lock(path)`, None if nobody does. Briefly takes the lock in shared mode."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
    finally:
        os.close(descriptor)
    return None
