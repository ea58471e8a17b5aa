"""Large memory from the system that is given back without stalling other threads.

While the system frees pages it holds a lock of the whole process, a fifth of a second per gigabyte: any other thread
that maps or unmaps memory then waits. If the freeing thread also holds the interpreter's lock (Python's mmap module, a
tensor's deallocation), so does every thread that runs Python code. So a background thread gives pages back in pieces,
without the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import mmap
import queue
import threading
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from kt_runtime.beside import PIECE_BYTES, give_way, pause

LEAST_COMMITTED_BYTES = 64 << 10
"""Less memory is not committed ahead: the system call takes as long as a few page faults."""
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE; Python's mmap has no name for it


def mapped(num_bytes: int) -> mmap.mmap:
    """New memory of zeros, at least 1 byte. The system commits a page when it is first written."""
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def array_of(memory: mmap.mmap, ended: Callable[[mmap.mmap], object] | None = None) -> np.ndarray:
    """A uint8 array [bytes] over `memory`. After the end of the array and all of its views, `ended` is called with the
    memory, on any thread; without `ended` the memory is freed."""
    _to_free()  # the thread starts here: `ended` may be called at any moment
    array = np.frombuffer(memory, np.uint8)
    weakref.finalize(array, ended or free_elsewhere, memory).atexit = False
    return array


def give_pages_back(memory: mmap.mmap, begin: int = 0, end: int | None = None) -> None:
    """Gives back the whole pages among the bytes from `begin` to `end`. From then on they contain zeros."""
    for piece in pieces_between(begin, len(memory) if end is None else end):
        pause()
        give_piece_back(memory, *piece)


def pieces_between(begin: int, end: int) -> list[tuple[int, int]]:
    """Begin and end of each piece of `PIECE_BYTES`, of the whole pages among these bytes."""
    first, last = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    return [(piece, min(piece + PIECE_BYTES, last)) for piece in range(first, last, PIECE_BYTES)]


def give_piece_back(memory: mmap.mmap, begin: int, end: int) -> None:
    """As `give_pages_back`, in one call and without a pause. `begin` is the first byte of a page."""
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    _madvise()(ctypes.c_void_p(start + begin), ctypes.c_size_t(end - begin), ctypes.c_int(mmap.MADV_DONTNEED))


def commit(address: int, num_bytes: int) -> None:
    """Commits whole pages among these bytes in one call, right before they are written: that takes two thirds of the
    time of a page fault for each. Contents stay. Does nothing on systems that can't (before Linux 5.14)."""
    first, last = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if last - first >= LEAST_COMMITTED_BYTES:
        _madvise()(ctypes.c_void_p(first), ctypes.c_size_t(last - first), ctypes.c_int(_POPULATE_WRITE))


def free_elsewhere(*objects: Any) -> None:
    """Gives the pages of mapped memory back, then drops these references, on another thread. The caller must keep
    none."""
    _to_free().put(objects)


@cache
def _madvise() -> Any:
    return ctypes.CDLL(None, use_errno=True).madvise  # without the interpreter's lock, unlike mmap.madvise


@cache
def _to_free() -> queue.SimpleQueue[tuple[Any, ...]]:
    waiting: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()  # its `put` may interrupt another one

    def free() -> None:
        give_way()
        while True:
            _free(waiting.get())

    threading.Thread(target=free, name="kt-free", daemon=True).start()
    return waiting


def _free(objects: tuple[Any, ...]) -> None:
    for each in objects:
        if isinstance(each, mmap.mmap):
            give_pages_back(each)
