"""Where a server's processes share Prometheus metrics: in memory, if there is room.

`prometheus_client` (multiprocess mode) writes metrics through memory maps of files, the engine's thread too, at each
batch. On a disk the first write to a page that the system has written out waits for the file system's journal. The
journal in turn waits while the file of an adapter is flushed, so every stream would stand still.

A directory of a killed server is removed by the next server of the same user.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from kt_runtime.errors import ConflictError, InvalidValueError
from kt_runtime.files import exclusive_lock
from kt_runtime.wire.address import private_directory

MEMORY = Path("/dev/shm")
"""A file system in memory on every Linux (shm_open(3)). Containers often have 64 MiB there."""
LEAST_FREE_BYTES = 256 << 20
"""The files of a server take some 20 MiB; other programs exchange tensors there."""


@contextlib.contextmanager
def metrics_directory(memory: Path = MEMORY, least_free_bytes: int = LEAST_FREE_BYTES) -> Iterator[Path | None]:
    """A new directory below `memory` for this user only, removed at the end. None: there is no room for one."""
    with contextlib.ExitStack() as held:
        try:
            found = os.statvfs(memory)
            if found.f_bavail * found.f_frsize < least_free_bytes:
                raise OSError(f"{memory} is full")
            base = private_directory(memory / f"kt-runtime-{os.geteuid()}")
            _remove_left(base)
            path = base / f"metrics-{uuid.uuid4().hex}"
            held.enter_context(exclusive_lock(_lock_of(path), "a server's metrics"))
            held.callback(remove, path)
            path.mkdir(mode=0o700)
        except (OSError, InvalidValueError, ConflictError):
            held.close()
            yield None
        else:
            yield path


def remove(path: Path) -> None:
    """A directory of this module's, or of SGLang's, whose processes have ended: for a process that ends without leaving
    its blocks."""
    shutil.rmtree(path, ignore_errors=True)
    _lock_of(path).unlink(missing_ok=True)


def _lock_of(path: Path) -> Path:
    return path.with_suffix(".lock")


def _remove_left(base: Path) -> None:
    """Removes the directories of servers that were killed: no process holds their locks."""
    for lock in base.glob("metrics-*.lock"):
        with contextlib.suppress(ConflictError, OSError), exclusive_lock(lock, "a server's metrics"):
            shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
            lock.unlink(missing_ok=True)
