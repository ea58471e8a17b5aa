"""Cleans up what a crash left half written in a directory of adapter versions: temporary entries, two levels deep."""

from __future__ import annotations

import shutil
from pathlib import Path

from kt_runtime.files import TEMPORARY_PREFIX


def remove_unfinished(root: Path) -> list[str]:
    """Removes temporary entries in `root` and in its directories; returns a message for each that can't be removed.

    Never call it beside a writer. Does nothing if `root` does not exist.
    """
    problems: list[str] = []
    for directory in [root, *_subdirectories(root, problems)]:
        for entry in _entries(directory, problems):
            if entry.name.startswith(TEMPORARY_PREFIX):
                _remove(entry, problems)
    return problems


def _remove(entry: Path, problems: list[str]) -> None:
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
        entry for entry in _entries(root, problems) if not entry.name.startswith(TEMPORARY_PREFIX) and entry.is_dir()
    ]


def _entries(directory: Path, problems: list[str]) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        problem = f"{directory}: can't be read: {error.strerror or error}"
        if problem not in problems:
            problems.append(problem)
        return []
