"""The directory of the prefix cache's disk tier: checked before the model loads, which can take hours.

The tier tolerates a disk that fills up or disappears during serving. Problems that exist at the start are reported to
the user.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from kt_runtime.cache.directory import is_part_of_rank, numbers_of_ranks, part_of_rank
from kt_runtime.cache.disk import DiskFiles
from kt_runtime.errors import ConflictError, InvalidValueError, NotFoundError
from kt_runtime.files import exclusive_lock
from kt_runtime.serve.memory.plan import format_bytes

# Entries that the disk tier (`kt_runtime.cache.directory`) or a file system creates in the directory, other than the
# parts of several ranks.
OWN_NAMES = frozenset({"lock", "index.log", "segments", "quarantine", "probe"})
FILE_SYSTEMS_NAMES = frozenset({"lost+found"})
FULL = (errno.ENOSPC, errno.EDQUOT)


def caches_directory() -> Path:
    """The default parent directory of all models' disk tiers (`--cache-dir` overrides it). It may not exist."""
    home = os.environ.get("XDG_CACHE_HOME")
    base = Path(home) if home and Path(home).is_absolute() else _expanded(Path("~")) / ".cache"
    return base / "kt-runtime" / "prefix"


def cache_directory(asked: Path | None, model_directory: Path, num_ranks: int = 1) -> Path:
    """The disk tier's directory: `asked`, or the default in the user's cache directory of this model on so many ranks.
    Creates nothing."""
    if asked is None:
        digest = hashlib.sha256(os.fsencode(model_directory)).hexdigest()[:8]
        ranks = f"-{num_ranks}-ranks" if num_ranks > 1 else ""
        asked = caches_directory() / f"{model_directory.name}-{digest}{ranks}"
    return _expanded(asked).absolute()


def _expanded(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError:  # a user without an entry in passwd, as in some containers
        raise InvalidValueError(f"--cache-dir: {path} is not known here; name a directory by its full path") from None


def check_directory(
    directory: Path, disk_bytes: int, *, read_only: bool, ranks: Sequence[int] = (0,), num_ranks: int = 1
) -> list[str]:
    """Creates the directory unless `read_only`. Returns warnings for the user. `ranks`: of this host, of `num_ranks`.

    Raises ConflictError if another server writes to the directory, NotFoundError if there is no cache to read, and
    InvalidValueError for a directory that can't be used, that other users may write to, or that holds what another
    number of ranks has written.
    """
    parts = [part_of_rank(directory, rank, num_ranks) for rank in ranks]
    try:
        if directory.exists() and not directory.is_dir():
            raise InvalidValueError(f"--cache-dir {directory}: is no directory")
        if read_only:
            _check_ranks(directory, num_ranks)
            for part in parts:
                _check_readable(part)
            _check_writers(directory)
            return []
        DiskFiles().make_directory(directory)
        _check_writers(directory)
        _check_content(directory)
        _check_access(directory, os.W_OK | os.X_OK, "may not write there")
        _check_ranks(directory, num_ranks)
        for part in parts:
            DiskFiles().make_directory(part)
            with exclusive_lock(part / "lock", f"cache directory {part}"):
                pass
    except ConflictError as error:
        raise ConflictError(
            f"--cache-dir {error}: one server writes to a cache directory; name another one, or pass --cache-read-only"
        ) from None
    except NotFoundError:  # NotFoundError is also an OSError
        raise
    except OSError as error:
        if error.errno not in FULL:
            raise InvalidValueError(f"--cache-dir {directory}: {_reason(error)}") from None
        return [f"prefix cache: the disk of {directory} is full; nothing is kept there until there is room"]
    return _lack_of_room(directory, parts, disk_bytes)


@contextlib.contextmanager
def claimed(directory: Path, runtime_directory: Path) -> Iterator[None]:
    """Keeps this user's other servers from starting with `directory`, also while this server still loads its model.

    Raises ConflictError. No file in `directory` itself stays open, since its disk may be detached."""
    digest = hashlib.sha256(os.fsencode(directory.resolve())).hexdigest()[:16]
    with exclusive_lock(runtime_directory / f"cache-{digest}.lock", f"--cache-dir {directory}"):
        yield


def _check_readable(directory: Path) -> None:
    if not (directory / "segments").is_dir():
        raise NotFoundError(f"--cache-dir {directory}: there is no prefix cache to read (no 'segments')")
    _check_access(directory, os.R_OK | os.X_OK, "may not read there")


def _check_ranks(directory: Path, num_ranks: int) -> None:
    """Refuses pages of another number of ranks: none of these ranks could use them, and they would take the room."""
    others = sorted(numbers_of_ranks(directory) - {num_ranks}) if directory.exists() else []
    if others:
        held = " and of ".join(map(_ranks, others))
        raise InvalidValueError(
            f"--cache-dir {directory}: holds pages of {held}, and this server has {_ranks(num_ranks)} (--tp-size "
            f"{num_ranks}), each with the keys and values of its own heads: name another directory, or empty this one "
            f"with kt-runtime cache clear --dir {directory}"
        )


def _ranks(number: int) -> str:
    return "one rank" if number == 1 else f"{number} ranks"


def _check_access(directory: Path, mode: int, what: str) -> None:
    if not os.access(directory, mode):
        read_only = mode & os.W_OK and os.statvfs(directory).f_flag & os.ST_RDONLY
        raise InvalidValueError(
            f"--cache-dir {directory}: {_reason(OSError(errno.EROFS, '')) if read_only else f'this user {what}'}"
        )


def _check_writers(directory: Path) -> None:
    """Refuses a directory that every user may write to: altered pages would alter answers, also of a read-only use."""
    mode = stat.S_IMODE(directory.stat().st_mode)
    if mode & stat.S_IWOTH:
        raise InvalidValueError(
            f"--cache-dir {directory}: every user may write there (mode {mode:04o}), hence change what models answer; "
            "name a directory of your own"
        )


def _check_content(directory: Path) -> None:
    """Refuses a directory that holds other files and no cache."""
    names = {name for name in os.listdir(directory) if not name.startswith(".")} - FILE_SYSTEMS_NAMES
    parts = {name for name in names if is_part_of_rank(name)}
    foreign = sorted(names - OWN_NAMES - parts)
    if foreign and not parts and "segments" not in names:
        raise InvalidValueError(
            f"--cache-dir {directory}: holds other things ({', '.join(foreign[:3])}{', ...' * (len(foreign) > 3)}); "
            "name an empty directory, or one that does not exist"
        )


def _reason(error: OSError) -> str:
    if error.errno == errno.EROFS:
        return "is on a read-only file system; name another, or pass --cache-read-only to use what is in it"
    return f"can't be used ({error.strerror})"


def _lack_of_room(directory: Path, parts: Sequence[Path], disk_bytes: int) -> list[str]:
    free = shutil.disk_usage(directory).free
    used = sum(path.stat().st_size for part in parts for path in (part / "segments").glob("*.seg"))
    if free + used >= disk_bytes:
        return []
    return [
        f"prefix cache: --cache-disk {format_bytes(disk_bytes)}, and {directory} has {format_bytes(free)} free and "
        f"{format_bytes(used)} in the cache: when the disk is full, nothing more is kept until there is room"
    ]
