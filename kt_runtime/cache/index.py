"""The index: which slot holds which record, and the LRU order; `Catalog` in memory, `IndexLog` on disk.

On disk the index is a log of blocks, each with some changes in the order in which they happened. Little endian.

    block:  4 magic "KTIX", 2 format version, 2 zero, 4 number of entries, 4 CRC-32 of the entries,
            4 CRC-32 of the 16 bytes before; then the entries
    entry:  1 kind (1 put, 2 drop, 3 use), 3 zero, 4 segment, 4 slot, 16 record id

Read from the beginning, puts and uses give the LRU order, least recently used first. `rewrite` replaces the log by one
without history. A block cut off at the end (after a crash) is ignored; damage before the end is reported, so that the
store can read the records themselves.
"""

from __future__ import annotations

import heapq
import struct
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kt_runtime.cache.disk import FileSystem, OpenFile
from kt_runtime.cache.format import FILE_HEADER_BYTES, FORMAT_VERSION, ID_BYTES, Geometry
from kt_runtime.files import TEMPORARY_PREFIX, empty_buffer

PUT, DROP, USE = 1, 2, 3

_HEADER = struct.Struct("<4sHHII")
_CHECKSUM = struct.Struct("<I")
_HEADER_BYTES = _HEADER.size + _CHECKSUM.size
_ENTRY = struct.Struct(f"<B3xII{ID_BYTES}s")
_MAGIC = b"KTIX"
ENTRY_BYTES = _ENTRY.size
_MOST_ENTRIES = 1 << 16
_READ_BYTES = 16 << 20

_SLOT_BITS = 32
_SLOT_MASK = (1 << _SLOT_BITS) - 1
_LARGEST_SEGMENT = 128 << 20
_SMALLEST_SEGMENT = 256 << 10
_MOST_SEGMENTS = 4096  # of one size of slot: a directory never gets near 10,000 entries


class Change(NamedTuple):
    """`number` and `slot` are 0 unless `kind` is PUT."""

    kind: int
    number: int
    slot: int
    record: bytes


def encode_block(changes: list[Change]) -> bytes:
    entries = b"".join(_ENTRY.pack(*change) for change in changes)
    header = _HEADER.pack(_MAGIC, FORMAT_VERSION, 0, len(changes), zlib.crc32(entries))
    return header + _CHECKSUM.pack(zlib.crc32(header)) + entries


class IndexLog:
    """`size_bytes`, `num_changes`: of the current log. After an OSError the end of the log is undefined: reopen it."""

    def __init__(self, files: FileSystem, path: Path, *, write: bool) -> None:
        self._files, self._path, self._write = files, path, write
        self._file = files.open(path, write=write, create=write)
        self.size_bytes = 0
        self.num_changes = 0
        self.is_damaged = False

    def replay(self) -> Iterator[tuple[int, int, int, bytes]]:
        """All changes in order (the fields of `Change` as plain tuples, since there may be millions). Afterwards
        `is_damaged` is True if a block before the end could not be read."""
        data = _read_all(self._file)
        offset = 0
        while offset < len(data):
            entries = _block_at(data, offset)
            if entries is None:
                self.is_damaged = _MAGIC in bytes(data[offset + 1 :])
                break
            self.num_changes += len(entries) // _ENTRY.size
            yield from _ENTRY.iter_unpack(entries)
            offset += _HEADER_BYTES + len(entries)
        self.size_bytes = offset
        if self._write and offset < len(data):
            self._file.truncate(offset)

    def append(self, changes: list[Change]) -> None:
        for start in range(0, len(changes), _MOST_ENTRIES):
            part = changes[start : start + _MOST_ENTRIES]
            block = encode_block(part)
            self._file.write_from([block], self.size_bytes)
            self.size_bytes += len(block)
            self.num_changes += len(part)

    def sync(self) -> None:
        self._file.sync()

    def rewrite(self, changes: Iterable[Change]) -> None:
        """Atomically replaces the whole log by `changes`."""
        temporary = self._path.with_name(TEMPORARY_PREFIX + self._path.name)
        fresh = IndexLog(self._files, temporary, write=True)
        try:
            fresh._file.truncate(0)
            part: list[Change] = []
            for change in changes:
                part.append(change)
                if len(part) == _MOST_ENTRIES:
                    fresh.append(part)
                    part = []
            fresh.append(part)
            fresh.sync()
            self._files.rename(temporary, self._path)
        except BaseException:
            fresh.close()
            raise
        self._file.close()
        self._file, self.size_bytes, self.num_changes = fresh._file, fresh.size_bytes, fresh.num_changes
        self._files.sync_directory(self._path.parent)

    def close(self) -> None:
        self._file.close()


def _block_at(data: memoryview, offset: int) -> bytes | None:
    """The entries of the block at `offset`; None if the block is cut off or damaged."""
    header = bytes(data[offset : offset + _HEADER_BYTES])
    if len(header) < _HEADER_BYTES:
        return None
    if zlib.crc32(header[: _HEADER.size]) != _CHECKSUM.unpack_from(header, _HEADER.size)[0]:
        return None
    magic, version, _, count, entries_checksum = _HEADER.unpack_from(header)
    start = offset + _HEADER_BYTES
    entries = bytes(data[start : start + count * _ENTRY.size])
    if (magic, version) != (_MAGIC, FORMAT_VERSION) or len(entries) < count * _ENTRY.size:
        return None
    return entries if zlib.crc32(entries) == entries_checksum else None


def _read_all(file: OpenFile) -> memoryview:
    data, offset = empty_buffer(file.size()), 0
    while offset < len(data):
        count = file.read_into([data[offset : offset + _READ_BYTES]], offset)
        if count == 0:
            break
        offset += count
    return data[:offset]


def location(number: int, slot: int) -> int:
    return number << _SLOT_BITS | slot


def parts(place: int) -> tuple[int, int]:
    return place >> _SLOT_BITS, place & _SLOT_MASK


def segment_bytes_for(quota_bytes: int) -> int:
    """Small enough that one segment is a small share of the quota, large enough that there are few segments."""
    return max(min(_LARGEST_SEGMENT, max(_SMALLEST_SEGMENT, quota_bytes // 64)), quota_bytes // _MOST_SEGMENTS)


@dataclass
class Segment:
    """`owners[s]`: the record in slot s, None if the slot is free, b"" while a record is being written to the slot."""

    geometry: Geometry
    owners: list[bytes | None] = field(default_factory=list)
    live: int = 0

    @property
    def file_bytes(self) -> int:
        return FILE_HEADER_BYTES + len(self.owners) * self.geometry.slot_bytes


class Catalog:
    """The records in their slots, the LRU order, and the slot that is written next.

    Not thread-safe: the store holds its lock around every call.

    A location is `segment number << 32 | slot`. `room_bytes`: most bytes of all segment files together; the owner sets
    it again when the index grows.
    """

    def __init__(self, quota_bytes: int) -> None:
        self.quota_bytes = quota_bytes
        self.room_bytes = quota_bytes
        self.segments: dict[int, Segment] = {}
        self.used_bytes = 0
        self.evicted: list[bytes] = []
        self.removed: list[int] = []
        self._records: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._free: dict[int, list[int]] = {}  # slot_bytes -> heap of locations
        self._growing: dict[int, int] = {}  # slot_bytes -> number of the segment that has room at its end
        self._pins: dict[int, int] = {}
        self._empty: set[int] = set()  # segments without records
        self._next_number = 1

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, record: bytes) -> bool:
        return record in self._records

    def oldest_first(self) -> Iterator[tuple[bytes, int]]:
        return iter(self._records.items())

    def find(self, record: bytes) -> int | None:
        return self._records.get(record)

    def touch(self, record: bytes) -> bool:
        """Makes `record` the most recently used; False if the catalog does not have it."""
        if record not in self._records:
            return False
        self._records.move_to_end(record)
        return True

    def pin(self, place: int) -> None:
        """The slot is not reused before `unpin`."""
        self._pins[place] = self._pins.get(place, 0) + 1

    def unpin(self, place: int) -> None:
        """Frees the slot now if its record was dropped while pinned."""
        left = self._pins.pop(place) - 1
        if left:
            self._pins[place] = left
        elif (segment := self.segments.get(place >> _SLOT_BITS)) and segment.owners[parts(place)[1]] is None:
            self._release(place, segment)

    # Loading, when a directory is opened

    def add_segment(self, geometry: Geometry, num_slots: int) -> None:
        """A segment found on disk; its slots are free until `load_changes`. Call `finish_loading` at the end."""
        segment = Segment(geometry, [None] * num_slots)
        self.segments[geometry.number] = segment
        self.used_bytes += segment.file_bytes
        self._next_number = max(self._next_number, geometry.number + 1)

    def finish_loading(self) -> None:
        for number, segment in self.segments.items():
            segment.live = len(segment.owners) - segment.owners.count(None)
            if segment.live == 0:
                self._empty.add(number)
            size = segment.geometry.slot_bytes
            free = self._free.setdefault(size, [])
            free.extend(location(number, slot) for slot, owner in enumerate(segment.owners) if owner is None)
            if len(segment.owners) < segment.geometry.capacity:
                self._growing[size] = number
        for free in self._free.values():
            heapq.heapify(free)

    def load_changes(self, changes: Iterable[tuple[int, int, int, bytes]]) -> None:
        """Replays (kind, segment, slot, record) in the order of the changes, see `IndexLog`. A put into an occupied
        slot removes the record that was there. Slots beyond the end of a truncated file are skipped.

        One loop without calls: there may be millions of changes.
        """
        records, move = self._records, self._records.move_to_end
        owners = {number: segment.owners for number, segment in self.segments.items()}
        nothing: list[bytes | None] = []
        for kind, number, slot, record in changes:
            if kind == PUT:
                slots = owners.get(number, nothing)
                if slot >= len(slots):
                    continue
                former = records.pop(record, None)
                if former is not None:
                    owners[former >> _SLOT_BITS][former & _SLOT_MASK] = None
                previous = slots[slot]
                if previous is not None:
                    del records[previous]
                slots[slot] = record
                records[record] = number << _SLOT_BITS | slot
            elif kind == DROP:
                former = records.pop(record, None)
                if former is not None:
                    owners[former >> _SLOT_BITS][former & _SLOT_MASK] = None
            elif record in records:
                move(record)

    def _disown(self, place: int) -> Segment:
        number, slot = parts(place)
        segment = self.segments[number]
        segment.owners[slot] = None
        segment.live -= 1
        if segment.live == 0:
            self._empty.add(number)
        return segment

    # In use

    def put(self, record: bytes, place: int) -> None:
        """Enters a record that was written to a slot from `allocate`. Frees the record's former slot."""
        self.drop(record)
        number, slot = parts(place)
        self.segments[number].owners[slot] = record
        self._records[record] = place

    def drop(self, record: bytes) -> bool:
        place = self._records.pop(record, None)
        if place is None:
            return False
        segment = self._disown(place)
        if place not in self._pins:
            self._release(place, segment)
        return True

    def give_up(self, place: int) -> None:
        """Frees a slot from `allocate` that was not written."""
        self._release(place, self._disown(place))

    def allocate(self, slot_bytes: int) -> int | None:
        """A slot to write to. Evicts the least recently used records if the quota requires it.

        Evicted records are appended to `evicted`, and numbers of removed segments to `removed`; the caller deletes the
        files and clears both lists. None: the record is too large, or everything evictable is being read.
        """
        if FILE_HEADER_BYTES + slot_bytes > self.room_bytes:
            return None
        while True:
            place = self._free_slot(slot_bytes)
            if place is None:
                place = self._new_slot(slot_bytes)
            if place is not None:
                number, slot = parts(place)
                self.segments[number].owners[slot] = b""
                self.segments[number].live += 1
                self._empty.discard(number)
                return place
            if not self._make_room(slot_bytes):
                return None

    def shrink(self) -> bool:
        """Removes whole segments until the rest fits `room_bytes`. False if that is not possible."""
        while self.used_bytes > self.room_bytes:
            if not self._make_room(0):
                return False
        return True

    def remove_empty(self) -> None:
        """Removes all segments without records."""
        for number in list(self._empty):
            self._remove(number)

    def _free_slot(self, slot_bytes: int) -> int | None:
        free = self._free.get(slot_bytes, [])
        while free:
            place = heapq.heappop(free)
            number, slot = parts(place)
            segment = self.segments.get(number)
            if segment is not None and segment.owners[slot] is None:
                return place
        return None

    def _new_slot(self, slot_bytes: int) -> int | None:
        number = self._growing.get(slot_bytes)
        if number is not None:
            segment = self.segments[number]
            if len(segment.owners) < segment.geometry.capacity:
                if self.used_bytes + slot_bytes > self.room_bytes:
                    return None
                return self._grow(segment)
        if self.used_bytes + FILE_HEADER_BYTES + slot_bytes > self.room_bytes:
            return None
        capacity = max(1, (segment_bytes_for(self.quota_bytes) - FILE_HEADER_BYTES) // slot_bytes)
        segment = Segment(Geometry(self._next_number, slot_bytes, capacity))
        self.segments[self._next_number] = segment
        self._growing[slot_bytes] = self._next_number
        self._next_number += 1
        self.used_bytes += FILE_HEADER_BYTES
        return self._grow(segment)

    def _grow(self, segment: Segment) -> int:
        segment.owners.append(None)
        self.used_bytes += segment.geometry.slot_bytes
        return location(segment.geometry.number, len(segment.owners) - 1)

    def _make_room(self, slot_bytes: int) -> bool:
        """Frees a slot of that size. Evicts the oldest record, or, if that record's slot has another size, its whole
        segment: a single slot of another size is of no use."""
        for number in list(self._empty):
            if self.segments[number].geometry.slot_bytes != slot_bytes and self._remove(number):
                return True
        for record, place in self._records.items():
            number, _ = parts(place)
            segment = self.segments[number]
            if segment.geometry.slot_bytes == slot_bytes:
                if place in self._pins:
                    continue
                self.evicted.append(record)
                return self.drop(record)
            if self._remove(number):
                return True
        return False

    def _remove(self, number: int) -> bool:
        """Removes the segment with all its records. False if one of its slots is in use."""
        segment = self.segments[number]
        busy = any(number == parts(place)[0] for place in self._pins)
        if busy or b"" in segment.owners:
            return False
        for owner in segment.owners:
            if owner is not None:
                self.evicted.append(owner)
                del self._records[owner]
        self.used_bytes -= segment.file_bytes
        del self.segments[number]
        self._empty.discard(number)
        size = segment.geometry.slot_bytes
        if self._growing.get(size) == number:
            del self._growing[size]
        self.removed.append(number)
        return True

    def _release(self, place: int, segment: Segment) -> None:
        heapq.heappush(self._free.setdefault(segment.geometry.slot_bytes, []), place)
