"""This process's memory: its size according to the kernel, and the allocator's handling of freed memory."""

from __future__ import annotations

import ctypes
import mmap

import psutil

from kt_runtime import spare
from kt_runtime.errors import ConflictError
from kt_runtime.mapped import commit

# mallopt(3). Larger thresholds for mmap are refused: 32 MiB is glibc's HEAP_MAX_SIZE / 2 on 64-bit machines.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 << 20
MOST_KEPT_BYTES = 1 << 30
"""Most bytes of freed memory that the C library keeps in a process with the whole model."""
_LEAST_KEPT_BYTES, _KEPT_SHARE, _MAPPED_SHARE = 4 << 20, 256, 4
_RESERVED_BYTES = 4 << 20
_SMALL_BYTES = 448  # and 33 of the object: CPython's allocator has objects of up to 512
_HALF_ARENA_BITS = 19  # bits of an address; CPython's ARENA_BITS is 20. Every arena contains a whole aligned half
_ARENA_BYTES = 1 << 20
_LIBC = ctypes.CDLL(None)
_reserved: list[bytes] = []


def resident_set_bytes() -> int:
    """Resident set size of this process."""
    return psutil.Process().memory_info().rss


def available_bytes() -> int:
    """Bytes that the system can allocate without swapping (`proc_meminfo(5)`, MemAvailable)."""
    return psutil.virtual_memory().available


def check_available(needed: int, what: str, hint: str = "") -> None:
    """Raises ConflictError, whose message begins with `what`, unless `needed` bytes are available.

    Memory of freed adapters that is still being given back counts as available (`spare.py`).
    """
    available = available_bytes() + spare.leaving_bytes()
    if needed > available:
        raise ConflictError(f"{what} needs {needed} bytes of memory, {available} are available{hint}")


def keep_freed_memory(most_bytes: int = MOST_KEPT_BYTES) -> bool:
    """Makes the C library keep up to `most_bytes` of freed memory for reuse, until `return_freed_memory`.

    Training on a CPU constantly allocates and frees tensors of some megabytes. By default glibc maps and unmaps each
    one, and the kernel clears its pages at first use: 6 to 8 % of a step. Tensors above a quarter of `most_bytes` are
    still mapped, since what is kept lies in holes between others. Returns False if the C library is not glibc.
    """
    mallopt = getattr(_LIBC, "mallopt", None)
    if mallopt is None:
        return False
    mapped_from = min(_LARGEST_MMAP_THRESHOLD, most_bytes // _MAPPED_SHARE)
    return bool(mallopt(_M_MMAP_THRESHOLD, mapped_from)) and bool(mallopt(_M_TRIM_THRESHOLD, most_bytes))


def reserve_for_small_objects(num_bytes: int = _RESERVED_BYTES) -> None:
    """Takes memory for Python's small objects (those of up to 512 bytes) now, which the process would take bit by bit.

    How much Python needs depends on how many objects are alive at once, and on the gaps between them. Both grow over
    the first ten thousand requests of a server, by megabytes that look like a leak. Python gives an arena of this
    memory back once it is empty: one object that stays in each half of it prevents that. The rest of the last arena
    would get its pages one by one, so the kernel is asked for them too, at most 1 MiB including what follows the arena.
    Linux before 5.14 refuses; the rest is then committed later, page by page.
    """
    small = [bytes(_SMALL_BYTES) for _ in range(num_bytes // _SMALL_BYTES)]
    page = id(small[-1]) & -mmap.PAGESIZE
    commit(page, _ARENA_BYTES)
    _reserved.extend({id(each) >> _HALF_ARENA_BITS: each for each in small}.values())


def return_freed_memory() -> None:
    """Returns freed memory to the system (malloc_trim(3)). No effect if the C library is not glibc."""
    trim = getattr(_LIBC, "malloc_trim", None)
    if trim is not None:
        trim(0)


class FreedMemory:
    """Bounds the freed memory that the C library keeps in a process with a share of a model: to 1/256 of the share.

    The memory that a layer allocates and frees leaves holes, of which the next layer uses only some. `give_back`
    returns them once the process has grown by more than `most_bytes` since the last time. Its check takes some
    microseconds.
    """

    def __init__(self, share_bytes: int) -> None:
        self.most_bytes = min(MOST_KEPT_BYTES, max(_LEAST_KEPT_BYTES, share_bytes // _KEPT_SHARE))
        self._seen_bytes = 0

    def give_back(self) -> None:
        now = resident_set_bytes()
        if now > self._seen_bytes + self.most_bytes:
            return_freed_memory()
            self._seen_bytes = resident_set_bytes()
        else:
            self._seen_bytes = min(self._seen_bytes, now)
