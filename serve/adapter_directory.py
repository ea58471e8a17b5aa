"""The directory of published adapter versions: checked and locked before the model loads, which can take hours.

The resident tolerates a disk that fills up or fails during serving. Problems that exist at the start are reported to
the user.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kt_runtime.adapters.paths import NAME_PATTERN
from kt_runtime.errors import ConflictError, InvalidValueError
from kt_runtime.files import TEMPORARY_PREFIX, exclusive_lock, remove_unfinished, visible_entries

LOCK_FILE = ".lock"
FULL = (errno.ENOSPC, errno.EDQUOT)


def adapter_directory(asked: Path | None, model_directory: Path) -> Path:
    """The directory of adapter versions: `asked`, or a default in the user's data directory. Created if missing.

    Each model has its own default, since adapters of one model do not fit another. Raises InvalidValueError.
    """
    directory = asked
    try:
        if directory is None:
            data = os.environ.get("XDG_DATA_HOME")
            base = Path(data) if data and Path(data).is_absolute() else Path.home() / ".local" / "share"
            digest = hashlib.sha256(os.fsencode(model_directory)).hexdigest()[:8]
            directory = base / "kt-runtime" / "adapters" / f"{model_directory.name}-{digest}"
        directory = directory.expanduser().absolute()
    except RuntimeError:  # a user without an entry in passwd, as in some containers
        raise InvalidValueError(
            f"--adapter-dir: {asked or 'the home directory'} is not known here; name a directory by its full path"
        ) from None
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidValueError(f"--adapter-dir {directory}: can't be created ({error.strerror})") from None
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        read_only = os.statvfs(directory).f_flag & os.ST_RDONLY
        why = "is on a read-only file system" if read_only else "this user may not read and write there"
        raise InvalidValueError(f"--adapter-dir {directory}: {why}; name another directory")
    return directory


@contextlib.contextmanager
def claimed_adapters(directory: Path, runtime_directory: Path) -> Iterator[None]:
    """Locks `directory` against other servers, whose clean-up would remove the files that this server is writing.

    The lock file is in `directory`, so the lock also excludes other users and other runtime directories. If the disk is
    too full for the file, the lock excludes this user's servers only. Raises ConflictError, InvalidValueError.
    """
    digest = hashlib.sha256(os.fsencode(directory.resolve())).hexdigest()[:16]
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(
                exclusive_lock(runtime_directory / f"adapters-{digest}.lock", f"--adapter-dir {directory}")
            )
            held.enter_context(exclusive_lock(directory / LOCK_FILE, f"--adapter-dir {directory}"))
        except ConflictError as error:
            raise ConflictError(f"{error}: one server writes to an adapter directory; name another one") from None
        except OSError as error:
            if error.errno not in FULL:
                raise InvalidValueError(f"--adapter-dir {directory}: can't be locked ({error.strerror})") from None
        yield


def check_adapters(directory: Path) -> list[str]:
    """Returns warnings for the user about a locked directory. Removes versions that an earlier server left incomplete.

    Raises InvalidValueError for a directory that can't be listed, or where no file can be written at all.
    """
    try:
        entries = visible_entries(directory)
    except OSError as error:
        raise InvalidValueError(f"--adapter-dir {directory}: can't be read ({error.strerror})") from None
    notes = [f"--adapter-dir: {problem}" for problem in remove_unfinished(directory)]
    for entry in entries:
        try:
            if NAME_PATTERN.fullmatch(entry.name) and entry.is_dir():
                os.listdir(entry)
        except OSError as error:
            problem = f"--adapter-dir: {entry}: can't be read: {error.strerror}"
            notes += (
                [f"{problem}; this adapter will not be served"] if not any(problem in note for note in notes) else []
            )
    return notes + _writing_problem(directory)


def _writing_problem(directory: Path) -> list[str]:
    """Warnings from a trial write of 4 KiB. A full disk is a warning; any other failure raises InvalidValueError."""
    notes = []
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=TEMPORARY_PREFIX, dir=directory)
        try:
            os.write(descriptor, b"\0" * 4096)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
            notes += _removal_problem(temporary)
    except OSError as error:
        if error.errno not in FULL:
            raise InvalidValueError(f"--adapter-dir {directory}: can't be written to ({error.strerror})") from None
        notes.append(
            f"--adapter-dir: the disk of {directory} is full: adapters are served, and written down when there is room"
        )
    return notes


def _removal_problem(temporary: str) -> list[str]:
    try:
        os.unlink(temporary)
    except OSError as error:
        return [f"--adapter-dir: {temporary}: a file that was just written can't be removed: {error.strerror}"]
    return []
