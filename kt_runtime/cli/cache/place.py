"""Finds the cache directory of a command, and lists existing ones."""

from __future__ import annotations

from pathlib import Path

from kt_runtime.cache import inspection
from kt_runtime.errors import NotFoundError, suggestion
from kt_runtime.serve.cache_directory import caches_directory


def caches_in(path: Path) -> list[Path]:
    try:
        return sorted(entry for entry in path.iterdir() if _is_cache(entry))
    except OSError:
        return []


def _is_cache(path: Path) -> bool:
    try:
        inspection.check_is_cache(path)
    except NotFoundError:
        return False
    return True


def cache_at(path: Path) -> Path:
    """`path`, absolute. Raises NotFoundError, which lists nearby caches, if `path` is no cache."""
    path = path.expanduser().absolute()
    try:
        inspection.check_is_cache(path)
    except NotFoundError as error:
        raise not_at(f"--dir {error}", near=path) from None
    return path


def only_cache(what: str) -> Path:
    """The only cache in the user's cache directory. Raises NotFoundError unless there is exactly one."""
    found = caches_in(caches_directory())
    if len(found) == 1:
        return found[0]
    raise not_at(f"cache {what}: name the directory with --dir")


def not_at(message: str, near: Path | None = None) -> NotFoundError:
    """`message` with suggested caches: those in `near`, next to it, and in the default directory."""
    root = caches_directory()
    known = set(caches_in(root))
    if near is not None:
        known |= {*caches_in(near), *caches_in(near.parent)}
    if not known:
        return NotFoundError(f"{message}; there is no cache in {root}")
    names = sorted(map(str, known))
    return NotFoundError(
        f"{message}{suggestion(str(near), names) if near is not None else '; known: ' + ', '.join(names)}"
    )
