"""A path that a client names is host 0's. What is loaded from it goes through --adapter-dir, which all hosts see."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

from kt_runtime.errors import KtError
from kt_runtime.files import TEMPORARY_PREFIX, errors_of_path

SUFFIXES = (".json", ".safetensors", ".bin", ".gguf")


@contextlib.asynccontextmanager
async def shared_copy(path: str, adapters: Path) -> AsyncIterator[str]:
    """The path of a copy of the adapter at `path` in `adapters`, for as long as the block runs. Errors in the block
    that name the copy name `path` instead. Raises InvalidValueError where it can't be copied.

    A path without an adapter is not copied; the error comes from reading it. A server that was killed leaves the copy
    behind, and the next one's start removes it (`remove_unfinished`).
    """
    source, copy = Path(path), adapters / f"{TEMPORARY_PREFIX}load-{secrets.token_hex(8)}{Path(path).suffix}"
    found = await asyncio.to_thread(_copied, source, copy)
    try:
        yield str(copy) if found else path
    except KtError as error:
        error.args = tuple(str(part).replace(str(copy), path) for part in error.args)
        raise
    finally:
        await asyncio.to_thread(_removed, copy)


def _copied(source: Path, copy: Path) -> bool:
    with errors_of_path(source, "copied to --adapter-dir"):
        if source.is_file():
            shutil.copyfile(source, copy)
            return True
        if not source.is_dir():
            return False
        copy.mkdir(mode=0o700)
        with os.scandir(source) as entries:
            for entry in entries:
                if entry.is_file() and Path(entry.name).suffix in SUFFIXES:
                    shutil.copyfile(entry.path, copy / entry.name)
    return True


def _removed(copy: Path) -> None:
    if copy.is_dir():
        shutil.rmtree(copy, ignore_errors=True)
    else:
        copy.unlink(missing_ok=True)
