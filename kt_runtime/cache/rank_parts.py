"""A cache directory of several ranks: each rank writes and reads a part of its own, with the pages of its heads.

DIRECTORY/rank-0-of-2/    as `directory` describes it, with a lock, an index and a quota of its own
DIRECTORY/rank-1-of-2/

With one rank the records lie in DIRECTORY itself. No rank can use what another number of ranks has written, so a
directory holds the pages of one number only.
"""

from __future__ import annotations

import re
from pathlib import Path

from kt_runtime.cache.filesystem import DiskFiles, FileSystem

_NAME = re.compile(r"rank-(0|[1-9][0-9]*)-of-([1-9][0-9]*)")


def part(directory: Path, rank: int, num_ranks: int) -> Path:
    """Where rank `rank` of `num_ranks` has its records."""
    return directory if num_ranks == 1 else directory / f"rank-{rank}-of-{num_ranks}"


def is_part(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def parts(directory: Path, files: FileSystem | None = None) -> list[Path]:
    """The caches of ranks in `directory`, in the order of ranks; none where one rank has its records.

    Raises OSError if `directory` can't be read.
    """
    files = files or DiskFiles()
    found = sorted(
        (int(match[2]), int(match[1])) for name in files.names(directory) if (match := _NAME.fullmatch(name))
    )
    paths = [part(directory, rank, num_ranks) for num_ranks, rank in found if num_ranks > 1]
    return [path for path in paths if "segments" in files.names(path)]


def numbers_of_ranks(directory: Path) -> set[int]:
    """Of the ranks that have records in `directory`, or a process that writes there."""
    found = {1} if _is_used(directory) else set()
    return found | {int(path.name.rpartition("-")[2]) for path in parts(directory) if _is_used(path)}


def _is_used(path: Path) -> bool:
    return any((path / "segments").glob("*.seg")) or DiskFiles().lock_holder(path / "lock") is not None
