"""Sequential write and read of one file, the baseline for the disk tier."""

from __future__ import annotations

import os
import time
from pathlib import Path

CALL_BYTES = 4 << 20  # per system call


def write(path: Path, source: memoryview) -> float:
    """Seconds to write a new file durably (fdatasync)."""
    path.unlink(missing_ok=True)
    started = time.perf_counter()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        offset = 0
        while offset < len(source):
            offset += os.pwrite(descriptor, source[offset : offset + CALL_BYTES], offset)
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)
    return time.perf_counter() - started


def read(path: Path, target: memoryview) -> float:
    """Seconds to fill `target`, which has the file's size."""
    started = time.perf_counter()
    descriptor = os.open(path, os.O_RDONLY)
    try:
        offset = 0
        while offset < len(target):
            count = os.preadv(descriptor, [target[offset : offset + CALL_BYTES]], offset)
            if count == 0:
                raise EOFError(f"{path} ended after {offset} of {len(target)} bytes")
            offset += count
    finally:
        os.close(descriptor)
    return time.perf_counter() - started
