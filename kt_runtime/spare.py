"""Freed memory of adapters, kept for the next adapter of the same size.

The kernel clears each page at its first use. That takes longer than copying an adapter into it, and twice as long
beside busy processors; a session that publishes again and again needs as much memory each time. Huge pages are no help:
where memory is fragmented, the kernel takes a second to find them.
"""

from __future__ import annotations

import contextlib
import mmap
import threading

import numpy as np

from kt_runtime.mapped import array_of, free_elsewhere, mapped

MOST_BYTES = 512 << 20
"""Kept in all, between `keep` and `free`."""
LEAST_SMALL_BYTES, SMALL_BYTES, MOST_SMALL_BYTES = 1 << 20, 16 << 20, 64 << 20
"""Small memory is kept always, so much in all."""

_KEPT: list[mmap.mmap] = []
_KEEPS_LARGE = threading.Event()


def array(num_bytes: int) -> np.ndarray:
    """uint8 [bytes], at least one, with arbitrary contents. The memory is free after the array and all of its views."""
    return array_of(_kept(num_bytes) or mapped(num_bytes), _ended)


def keep() -> None:
    """From now on, large memory is kept, too."""
    _KEEPS_LARGE.set()


def free() -> None:
    """Gives back what was kept, and keeps no large memory from now on."""
    _KEEPS_LARGE.clear()
    with contextlib.suppress(IndexError):
        while True:
            free_elsewhere(_KEPT.pop())


def kept_bytes() -> int:
    return sum(map(len, list(_KEPT)))


def _kept(num_bytes: int) -> mmap.mmap | None:
    for memory in list(_KEPT):
        if len(memory) == num_bytes:
            with contextlib.suppress(ValueError):  # another thread was faster
                _KEPT.remove(memory)
                return memory
    return None


def _ended(memory: mmap.mmap) -> None:
    """On any thread, at any moment: nothing here takes a lock. The oldest make room."""
    keeps_large = _KEEPS_LARGE.is_set()
    if not keeps_large and not LEAST_SMALL_BYTES <= len(memory) <= SMALL_BYTES:
        free_elsewhere(memory)
        return
    _KEPT.append(memory)
    with contextlib.suppress(IndexError):
        while kept_bytes() > (MOST_BYTES if keeps_large else MOST_SMALL_BYTES):
            free_elsewhere(_KEPT.pop(0))
