"""Segment files: a header of 4096 bytes, then slots of one size. Little endian.

    offset bytes
       0     4   magic "KTSG"
       4     2   format version
       6     2   zero
       8     4   the segment's number, also its name ("00000007.seg")
      12     8   bytes of a slot
      20     4   slots that the file may have
      24     4   CRC-32 of the 24 bytes before

Slot s begins at 4096 + s * slot_bytes. Slots of large records are whole blocks of 4 KiB, so that writing one needs no
read. A slot is reused in place for another record of the same size: a record is identified by its own header, never by
its place. The file grows slot by slot and never shrinks; it is removed whole.
"""

from __future__ import annotations

import re
import struct
import zlib
from dataclasses import dataclass

from kt_runtime.cache.filesystem import OpenFile
from kt_runtime.cache.record import FORMAT_VERSION, HEADER_BYTES

FILE_HEADER_BYTES = 4096
_ALIGNMENT = 512
_BLOCK = 4096
_LARGE_PAYLOAD = 256 << 10  # from here on, padding to whole blocks costs less than 2 %

_HEADER = struct.Struct("<4sHHIQI")
_CHECKSUM = struct.Struct("<I")
_MAGIC = b"KTSG"
_NAME = re.compile(r"([0-9]{8,10})\.seg")


def slot_bytes_for(payload_bytes: int) -> int:
    unit = _BLOCK if payload_bytes >= _LARGE_PAYLOAD else _ALIGNMENT
    return -(-(HEADER_BYTES + payload_bytes) // unit) * unit


def segment_name(number: int) -> str:
    return f"{number:08d}.seg"


def segment_number(name: str) -> int | None:
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


@dataclass
class Geometry:
    """`capacity`: slots that the segment may have."""

    number: int
    slot_bytes: int
    capacity: int

    def offset(self, slot: int) -> int:
        return FILE_HEADER_BYTES + slot * self.slot_bytes

    def encode(self) -> bytes:
        fields = _HEADER.pack(_MAGIC, FORMAT_VERSION, 0, self.number, self.slot_bytes, self.capacity)
        return (fields + _CHECKSUM.pack(zlib.crc32(fields))).ljust(FILE_HEADER_BYTES, b"\0")

    def slots_in(self, file_bytes: int) -> int:
        """Slots in a file of that size, a truncated last one included."""
        return min(self.capacity, -(-max(0, file_bytes - FILE_HEADER_BYTES) // self.slot_bytes))


def read_geometry(file: OpenFile, number: int) -> Geometry | None:
    """None if the file is not a segment of this format and number."""
    data = bytearray(FILE_HEADER_BYTES)
    if file.read_into([data], 0) < FILE_HEADER_BYTES:
        return None
    magic, version, _, stored_number, slot_bytes, capacity = _HEADER.unpack_from(data)
    right = zlib.crc32(data[: _HEADER.size]) == _CHECKSUM.unpack_from(data, _HEADER.size)[0]
    if not right or (magic, version, stored_number) != (_MAGIC, FORMAT_VERSION, number):
        return None
    if slot_bytes < HEADER_BYTES or slot_bytes % _ALIGNMENT or capacity < 1:
        return None
    return Geometry(number, slot_bytes, capacity)
