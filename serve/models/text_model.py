"""A model that reads images too, as a text model: a small directory that stands for its language model.

The directory lies in the user's cache. Its config.json is that of the language model (`families/wrapped.py`); all other
files are links to those of the checkpoint, whose tensors are found under their own names. It is made anew when the
checkpoint's config.json or its list of files has changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from kt_runtime.checkpoint_file import read_json
from kt_runtime.errors import CheckpointError, ConflictError, InvalidValueError
from kt_runtime.families.wrapped import text_config, wrapper_of
from kt_runtime.files import write_directory
from kt_runtime.serve.models.hub_cache import user_cache_directory

CONFIG = "config.json"


def text_directory(directory: Path) -> Path:
    """The directory that stands for the language model of `directory`; `directory` itself if it holds a text model, or
    no config.json that can be read. Raises CheckpointError for a wrapper without a language model's config."""
    config = _config(directory)
    if config is None or wrapper_of(config) is None:
        return directory
    try:
        content = json.dumps(text_config(config), indent=2).encode()
    except InvalidValueError as error:
        raise CheckpointError(f"{directory / CONFIG}: {error}") from None
    place = _place(directory)
    links = {entry.name: entry.resolve() for entry in directory.iterdir() if entry.is_file() and entry.name != CONFIG}
    if not _holds(place, content, links):
        write_directory(place, lambda temporary: _fill(temporary, content, links), replace=_check_ours)
    return place


def _config(directory: Path) -> dict[str, Any] | None:
    """None where `check_checkpoint` says what is wrong."""
    path = directory / CONFIG
    try:
        config = read_json(path) if path.is_file() else None
    except CheckpointError:
        return None
    return config if isinstance(config, dict) else None


def _place(directory: Path) -> Path:
    name = re.sub(r"[^\w.-]", "_", directory.name)[:80]
    digest = hashlib.sha256(str(directory.resolve()).encode()).hexdigest()[:12]
    return user_cache_directory() / "kt-runtime" / "text-models" / f"{name}-{digest}"


def _holds(place: Path, content: bytes, links: dict[str, Path]) -> bool:
    if not place.is_dir() or {entry.name for entry in place.iterdir()} != {CONFIG, *links}:
        return False
    are_links = all((place / name).is_symlink() and Path(os.readlink(place / name)) == to for name, to in links.items())
    return are_links and (place / CONFIG).read_bytes() == content


def _fill(directory: Path, content: bytes, links: dict[str, Path]) -> None:
    (directory / CONFIG).write_bytes(content)
    for name, to in links.items():
        (directory / name).symlink_to(to)


def _check_ours(directory: Path, shown: Path) -> None:
    """Approves a directory that holds links and a config.json only."""
    for entry in directory.iterdir():
        if not entry.is_symlink() and entry.name != CONFIG:
            raise ConflictError(f"{shown}: not replaced: it holds {entry.name[:80]!r}, which is no link")
