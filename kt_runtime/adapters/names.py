"""Adapter names, and paths that must stay below a directory. Needs no torch."""

from __future__ import annotations

import os
import re
from pathlib import Path

from kt_runtime.errors import InvalidValueError

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
