"""Pages in memory: a caller's page, a pool of buffers, and the transfer between memory and slots of a segment."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kt_runtime.cache.disk import Buffer, OpenFile
from kt_runtime.cache.format import (
    FORMAT_VERSION,
    HEADER_BYTES,
    Fault,
    Geometry,
    Header,
    check_record,
    checksum,
    encode_header,
    slot_bytes_for,
)

_SLAB_BYTES = 32 << 20
_CACHE_LINE = 64


@dataclass(frozen=True)
class Page:
    """`pieces`: the payload in order, each piece contiguous: the target of a read or the source of a write.

    `slot`: if given, memory of a whole slot that contains the one piece at its offset (`page_in_slot`).
    """

    key: bytes
    pieces: Sequence[bytearray | memoryview]
    slot: memoryview | None = None

    @property
    def payload_bytes(self) -> int:
        return sum(len(piece) for piece in self.pieces)

    def fill(self, payload: memoryview) -> None:
        """Copies `payload` into the pieces."""
        offset = 0
        for piece in self.pieces:
            _copy(piece, payload[offset : offset + len(piece)])
            offset += len(piece)

    def copy_to(self, payload: memoryview) -> None:
        offset = 0
        for piece in self.pieces:
            _copy(payload[offset : offset + len(piece)], piece)
            offset += len(piece)


def _copy(target: bytearray | memoryview, source: bytearray | memoryview) -> None:
    """NumPy releases the GIL while copying; a memoryview assignment does not. The disk's threads run meanwhile."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def neighbours(placed: list[tuple[Page, int]], largest_bytes: int) -> Iterator[list[tuple[Page, int]]]:
    """Runs of `placed` (pages with their locations) with consecutive slots and payloads of one size, in order. A run
    ends once it has `largest_bytes`."""
    by_slot = itertools.groupby(enumerate(placed), key=lambda item: (item[1][1] - item[0], item[1][0].payload_bytes))
    for (_, size), run in by_slot:
        part = [item for _, item in run]
        step = max(1, largest_bytes // max(1, size))
        for start in range(0, len(part), step):
            yield part[start : start + step]


def page_in_slot(key: bytes, slot: memoryview, payload_bytes: int) -> Page:
    """A page to read into memory of `slot_bytes_for(payload_bytes)`. The memory covers the whole slot, so that slots of
    whole blocks are read from the disk without a copy through the page cache."""
    return Page(key, [slot[HEADER_BYTES : HEADER_BYTES + payload_bytes]], slot)


@dataclass(frozen=True)
class Fetched:
    """`page` and its record's header as read from the slot at `place`, both unchecked. There is no header where the
    slot has another record size."""

    page: Page
    place: int
    header: Buffer | None

    def check(self, namespace: bytes) -> Fault | None:
        """None if it is the expected record."""
        if self.header is None:
            return Fault.WRONG_LENGTH
        return check_record(self.header, self.page.pieces, namespace, self.page.key)


def fetch_slots(
    file: OpenFile, geometry: Geometry, first_slot: int, group: Sequence[tuple[Page, int]]
) -> list[Fetched]:
    """Fills the pages, all of one size, from neighbouring slots, `first_slot` and following, with one system call."""
    payload_bytes = group[0][0].payload_bytes
    if slot_bytes_for(payload_bytes) != geometry.slot_bytes:
        return [Fetched(page, place, None) for page, place in group]
    fetched: list[Fetched] = []
    pieces: list[bytearray | memoryview] = []
    padding = bytearray(geometry.slot_bytes - HEADER_BYTES - payload_bytes)
    for page, place in group:
        header = bytearray(HEADER_BYTES) if page.slot is None else page.slot[:HEADER_BYTES]
        header[:] = bytes(HEADER_BYTES)  # erases old memory contents: a truncated file has no header here
        fetched.append(Fetched(page, place, header))
        pieces += [header, *page.pieces, padding] if page.slot is None else [page.slot]
    file.read_into(pieces, geometry.offset(first_slot))
    return fetched


def write_slots(
    file: OpenFile, geometry: Geometry, first_slot: int, pages: Sequence[Page], namespace: bytes, sequence: int
) -> None:
    """Writes `pages`, which fit the slots, from `first_slot` on, with one system call. Their sequences count up from
    `sequence`."""
    pieces: list[Buffer] = []
    for number, page in enumerate(pages, sequence):
        size = page.payload_bytes
        header = Header(FORMAT_VERSION, page.key, size, number, checksum(page.pieces), namespace)
        pieces += [encode_header(header), *page.pieces, bytes(geometry.slot_bytes - HEADER_BYTES - size)]
    file.write_from(pieces, geometry.offset(first_slot))


class BufferPool:
    """Buffers for disk transfers, reused since fresh memory costs page faults.

    At most `limit_bytes` are handed out at a time. A returned buffer is kept for the next page of the same size.

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
