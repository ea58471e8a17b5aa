"""Memory for pages on their way to and from the disk: bounded, and used again, since fresh memory costs page faults."""

from __future__ import annotations

import contextlib
import mmap
import threading

_SLAB_BYTES = 32 << 20
_CACHE_LINE = 64


class BufferPool:
    """At most `limit_bytes` are out at a time. Memory given back is kept for the next page of the same size.

    Buffers begin on whole memory pages, small ones on cache lines: reading a file into memory that begins anywhere is
    four times slower on some processors, and that is where malloc puts large blocks. They lie in huge pages where the
    system has some: it hands a disk memory in pieces of a page each, and of small ones it takes many requests.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._changed = threading.Condition()
        self._out = 0
        self._kept: dict[int, list[memoryview]] = {}
        self._kept_bytes = 0

    @property
    def out_bytes(self) -> int:
        return self._out

    def take(self, size: int, timeout_s: float = 0.0) -> memoryview | None:
        """`size` bytes with arbitrary contents, or None if there is no room within the time."""
        with self._changed:
            if size > self.limit_bytes:
                return None
            if not self._changed.wait_for(lambda: self._out + size <= self.limit_bytes, timeout_s):
                return None
            if not self._kept.get(size):
                self._forget_other_sizes(size)
                try:
                    self._keep(size, _slab(size, self.limit_bytes - self._out - self._kept_bytes))
                except (OSError, MemoryError):  # the machine has none left
                    return None
            self._out += size
            self._kept_bytes -= size
            return self._kept[size].pop()

    def give_back(self, buffer: memoryview) -> None:
        with self._changed:
            self._out -= len(buffer)
            self._keep(len(buffer), [buffer])
            self._changed.notify_all()

    def _keep(self, size: int, buffers: list[memoryview]) -> None:
        """Under the lock."""
        self._kept.setdefault(size, []).extend(buffers)
        self._kept_bytes += size * len(buffers)

    def _forget_other_sizes(self, size: int) -> None:
        """Under the lock. Kept memory counts too: sizes that are not in use any more make room."""
        for other in list(self._kept):
            if self._out + self._kept_bytes + size <= self.limit_bytes:
                return
            if other != size:
                self._kept_bytes -= other * len(self._kept.pop(other))


def _slab(size: int, room_bytes: int) -> list[memoryview]:
    """Buffers of `size`, one at least, that lie in one piece of memory; it goes when the last of them goes."""
    unit = mmap.PAGESIZE if size >= mmap.PAGESIZE else _CACHE_LINE
    step = -(-size // unit) * unit
    count = max(1, min(_SLAB_BYTES, room_bytes) // step)
    memory = mmap.mmap(-1, count * step, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # a system without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    slab = memoryview(memory)
    return [slab[start : start + size] for start in reversed(range(0, count * step, step))]
