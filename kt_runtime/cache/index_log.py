"""The index on disk: a log of blocks, each with some changes in the order in which they happened. Little endian.

    block:  4 magic "KTIX", 2 format version, 2 zero, 4 number of entries, 4 CRC-32 of the entries,
            4 CRC-32 of the 16 bytes before; then the entries
    entry:  1 kind (1 put, 2 drop, 3 use), 3 zero, 4 segment, 4 slot, 16 record id

Read from the beginning, puts and uses give the LRU order, least recently used first. `rewrite` replaces the log by one
without history. A block cut off at the end (after a crash) is ignored; damage before the end is reported, so that the
store can read the records themselves.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from kt_runtime.cache.filesystem import FileSystem, OpenFile
from kt_runtime.cache.record import FORMAT_VERSION, ID_BYTES
from kt_runtime.files import TEMPORARY_PREFIX

PUT, DROP, USE = 1, 2, 3

_HEADER = struct.Struct("<4sHHII")
_CHECKSUM = struct.Struct("<I")
_HEADER_BYTES = _HEADER.size + _CHECKSUM.size
_ENTRY = struct.Struct(f"<B3xII{ID_BYTES}s")
_MAGIC = b"KTIX"
ENTRY_BYTES = _ENTRY.size
_MOST_ENTRIES = 1 << 16
_READ_BYTES = 16 << 20


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
                self.is_damaged = data.find(_MAGIC, offset + 1) >= 0
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


def _block_at(data: memoryview | bytes, offset: int) -> bytes | None:
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


def _read_all(file: OpenFile) -> bytes:
    size = file.size()
    data = bytearray(size)
    view, offset = memoryview(data), 0
    while offset < size:
        count = file.read_into([view[offset : offset + _READ_BYTES]], offset)
        if count == 0:
            break
        offset += count
    return bytes(view[:offset])
