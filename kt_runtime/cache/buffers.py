"""A bounded pool of page buffers for disk transfers. Buffers are reused, since fresh memory costs page faults."""

from __future__ import annotations

import contextlib
import mmap
import threading

_SLAB_BYTES = 32 << 20
_CACHE_LINE = 64


class BufferPool:
    """At most `limit_bytes` are handed out at a time. A returned buffer is kept for the next page of the same size.

    Buffers are aligned to memory pages, small ones to cache lines: on some processors, reading a file into unaligned
    memory, such as malloc's large blocks, is four times slower. Buffers lie in huge pages where the system has some: a
    disk transfer takes one piece for each memory page, so small pages split it into many requests.
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
        """A buffer of `size` bytes with arbitrary contents, or None if no memory is free within the timeout."""
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
        """Call with the lock held."""
        self._kept.setdefault(size, []).extend(buffers)
        self._kept_bytes += size * len(buffers)

    def _forget_other_sizes(self, size: int) -> None:
        """Call with the lock held. Kept buffers count towards the limit: sizes no longer in use make room."""
        for other in list(self._kept):
            if self._out + self._kept_bytes + size <= self.limit_bytes:
                return
            if other != size:
                self._kept_bytes -= other * len(self._kept.pop(other))


def _slab(size: int, room_bytes: int) -> list[memoryview]:
    """At least one buffer of `size`; all share one allocation, which is freed with the last of them."""
    unit = mmap.PAGESIZE if size >= mmap.PAGESIZE else _CACHE_LINE
    step = -(-size // unit) * unit
    count = max(1, min(_SLAB_BYTES, room_bytes) // step)
    memory = mmap.mmap(-1, count * step, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # a system without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    slab = memoryview(memory)
    return [slab[start : start + size] for start in reversed(range(0, count * step, step))]
