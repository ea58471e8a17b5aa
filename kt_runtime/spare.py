"""Freed memory of adapters: kept for the next adapter of the same size, or given back slowly.

The kernel clears each page at its first use. That takes longer than copying an adapter into it, and twice as long while
the other cores are busy. A session that publishes repeatedly needs the same amount of memory each time. Huge pages do
not help: if memory is fragmented, the kernel takes a second to find them.

A virtual machine whose system reports free pages to the host (virtio-balloon's free page reporting) stops all of its
processors while the host takes them: 20 to 35 ms for each 128 MiB, every two seconds. So while requests are served and
memory is plenty, memory is given back at `GIVEN_BACK_BYTES_PER_S`, by one thread. What is not given back yet is used
for the next adapter of the same size. `give_back` is for memory of another module: a slot's.
"""

from __future__ import annotations

import contextlib
import mmap
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cache

import numpy as np
import psutil

from kt_runtime.beside import BATCHES, PIECE_BYTES, give_way, pause
from kt_runtime.mapped import array_of, give_piece_back, mapped

MOST_BYTES = 512 << 20
"""Upper bound on all kept memory, between `keep` and `free`."""
LEAST_SMALL_BYTES, SMALL_BYTES, MOST_SMALL_BYTES = 1 << 20, 16 << 20, 64 << 20
"""Memory of at least the first and at most the second size is always kept, up to the third in total."""
GIVEN_BACK_BYTES_PER_S = 32 << 20
"""Rate at which freed memory is given back while requests are served."""
PLENTY = 0.25
"""While less than this share of the machine's memory is available, freed memory is given back without a rate limit."""

_KEPT: list[mmap.mmap] = []
_KEEPS_LARGE = threading.Event()


def array(num_bytes: int) -> np.ndarray:
    """A uint8 array [bytes], at least one, with arbitrary contents. Its memory is freed with the last of its views."""
    _to_leave()  # the thread starts here: `_ended` may be called at any moment
    return array_of(_kept(num_bytes) or _taken(num_bytes) or mapped(num_bytes), _ended)


def keep() -> None:
    """From now on, large memory is kept, too."""
    _KEEPS_LARGE.set()


def free() -> None:
    """Gives kept memory back, and keeps no large memory from now on."""
    _KEEPS_LARGE.clear()
    with contextlib.suppress(IndexError):
        while True:
            _leave(_LeavingMemory(_KEPT.pop()))


def kept_bytes() -> int:
    return sum(map(len, list(_KEPT)))


def leaving_bytes() -> int:
    """Bytes that are still to be given back; without a rate limit once memory is short."""
    return sum(each.left_bytes for each in list(_LEAVING))


def _kept(num_bytes: int) -> mmap.mmap | None:
    for memory in list(_KEPT):
        if len(memory) == num_bytes:
            with contextlib.suppress(ValueError):  # another thread was faster
                _KEPT.remove(memory)
                return memory
    return None


def _ended(memory: mmap.mmap) -> None:
    """Keeps or gives back freed memory; beyond the bound the oldest is given back. Called on any thread at any moment,
    so nothing here takes a lock."""
    keeps_large = _KEEPS_LARGE.is_set()
    if not keeps_large and not LEAST_SMALL_BYTES <= len(memory) <= SMALL_BYTES:
        _leave(_LeavingMemory(memory))
        return
    _KEPT.append(memory)
    with contextlib.suppress(IndexError):
        while kept_bytes() > (MOST_BYTES if keeps_large else MOST_SMALL_BYTES):
            _leave(_LeavingMemory(_KEPT.pop(0)))


class Leaving:
    """Memory of another module that is given back in parts. `left_bytes`: bytes not given back yet. `ended`: done at
    the end, or once a part has returned False."""

    def __init__(self, parts: Sequence[Callable[[], bool]], num_bytes: int) -> None:
        self._parts, self.left_bytes, self.ended = parts, num_bytes, Future[None]()

    def give_back(self) -> None:
        each = -(-self.left_bytes // max(len(self._parts), 1))
        try:
            for part in self._parts:
                if not part():
                    return
                self.left_bytes = max(0, self.left_bytes - each)
                _wait(each)
        finally:
            self.left_bytes = 0
            self.ended.set_result(None)


def give_back(parts: Sequence[Callable[[], bool]], num_bytes: int) -> Leaving:
    """Calls `parts`, each of which gives some of `num_bytes` back, on another thread and at the rate of other memory.
    Stops when one returns False: the memory is in use again."""
    leaving = Leaving(parts, num_bytes)
    _leave(leaving)
    return leaving


class _LeavingMemory:
    """Memory that is given back in pieces; until all of it is, it may be taken for another adapter."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory, self.left_bytes = memory, len(memory)
        self._lock, self._is_taken = threading.Lock(), False

    def take(self) -> bool:
        """Takes the memory for another use, with arbitrary contents. False: it was taken or given back before."""
        with self._lock:
            was_taken, self._is_taken, self.left_bytes = self._is_taken, True, 0
            return not was_taken

    def give_back(self) -> None:
        size = len(self.memory)
        for begin in range(0, size, PIECE_BYTES):
            end = min(begin + PIECE_BYTES, size)
            pause()
            with self._lock:
                if self._is_taken:
                    return
                give_piece_back(self.memory, begin, end)
                self.left_bytes = size - end
            _wait(end - begin)
        self.take()  # an empty mapping is of no use


_LEAVING: list[_LeavingMemory | Leaving] = []


def _taken(num_bytes: int) -> mmap.mmap | None:
    same = (each for each in list(_LEAVING) if isinstance(each, _LeavingMemory) and len(each.memory) == num_bytes)
    return next((each.memory for each in same if each.take()), None)


def _leave(leaving: _LeavingMemory | Leaving) -> None:
    """Queues memory to be given back. Called on any thread at any moment."""
    _LEAVING.append(leaving)
    _to_leave().put(leaving)


@cache
def _to_leave() -> queue.SimpleQueue[_LeavingMemory | Leaving]:
    waiting: queue.SimpleQueue[_LeavingMemory | Leaving] = queue.SimpleQueue()  # its `put` may interrupt another one

    def leave() -> None:
        give_way()
        while True:
            each = waiting.get()
            each.give_back()
            _LEAVING.remove(each)
            del each

    threading.Thread(target=leave, name="kt-leave", daemon=True).start()
    return waiting


def _wait(num_bytes: int) -> None:
    """Waits after giving back `num_bytes`, to keep the rate."""
    if BATCHES.are_computed():
        memory = psutil.virtual_memory()
        if memory.available >= PLENTY * memory.total:
            time.sleep(num_bytes / GIVEN_BACK_BYTES_PER_S)
