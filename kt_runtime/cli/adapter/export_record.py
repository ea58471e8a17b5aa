"""The record by which `--overwrite` recognizes exports, the only files and directories that it replaces.

A directory has `kt_export.json` with the names of its files; a `.gguf` file has a metadata key. Readers of adapters and
checkpoints ignore both.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from kt_runtime.adapters.gguf_lora import is_written_here
from kt_runtime.errors import ConflictError

RECORD_FILE = "kt_export.json"
MAX_RECORD_BYTES = 1 << 20


class ExportRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`files`: names of the directory's files, without the record itself."""

    files: tuple[str, ...]
    format: int = 1


def record_of(names: Iterable[str]) -> bytes:
    record = ExportRecord(files=tuple(sorted(set(names) - {RECORD_FILE})))
    return json.dumps(msgspec.to_builtins(record), indent=2).encode() + b"\n"


def check_replaced(path: Path) -> None:
    """Raises ConflictError unless an export wrote the existing `path`, and no file was added since."""
    if path.is_symlink():
        raise _not_ours(path, "it is a link")
    if path.is_dir():
        _check_directory(path)
    elif not (path.is_file() and path.suffix == ".gguf" and is_written_here(path)):
        raise _not_ours(path, "it is no directory, and no .gguf file of an export")


def _check_directory(directory: Path) -> None:
    record = directory / RECORD_FILE
    if record.is_symlink() or not record.is_file() or record.stat().st_size > MAX_RECORD_BYTES:
        raise _not_ours(directory, f"it has no {RECORD_FILE}")
    try:
        files = set(msgspec.json.decode(record.read_bytes(), type=ExportRecord).files)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _not_ours(directory, f"{RECORD_FILE}: {error}") from None
    with os.scandir(directory) as entries:
        for entry in entries:
            if not entry.is_file(follow_symlinks=False) or entry.name not in files | {RECORD_FILE}:
                raise _not_ours(directory, f"it holds {entry.name[:80]!r}, which no export wrote")


def _not_ours(path: Path, why: str) -> ConflictError:
    return ConflictError(
        f"{path}: --overwrite replaces only what an export wrote, and {why}; remove it, or choose another name"
    )
