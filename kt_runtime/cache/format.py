"""The files of a cache directory that hold pages: segments with slots, and one record in each slot. Little endian.

A segment is a header of 4096 bytes, then slots of one size:

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

A record is one page: a header of 160 bytes, then the payload:

    offset bytes
       0     4   magic "KTPG"
       4     2   format version
       6     2   length of the key
       8     8   length of the payload
      16     8   sequence: increases with every record written
      24     8   XXH3-64 of the payload
      32    16   namespace (`Namespace.digest`)
      48    96   key, padded with zero bytes
     144     4   CRC-32 of the 144 bytes before
     148    12   zero

A record is valid only if all of this is what the reader asked for. Anything else in the slot, left by a crash, by
another model's server or by a damaged disk, is some `Fault`, hence a miss.
XXH3 (https://github.com/Cyan4973/xxHash) finds torn and flipped bytes as well as 64 bits can, four times as fast as
zlib's CRC-32. It is no protection against an attacker with write access to the directory.
"""

from __future__ import annotations

import enum
import hashlib
import re
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, fields

import xxhash

from kt_runtime.cache.disk import Buffer, OpenFile
from kt_runtime.errors import InvalidValueError

FORMAT_VERSION = 1

FILE_HEADER_BYTES = 4096
_ALIGNMENT = 512
_BLOCK = 4096
_LARGE_PAYLOAD = 256 << 10  # from here on, padding to whole blocks costs less than 2 %
_SEGMENT = struct.Struct("<4sHHIQI")
_SEGMENT_MAGIC = b"KTSG"
_NAME = re.compile(r"([0-9]{8,10})\.seg")

HEADER_BYTES = 160
NAMESPACE_BYTES = 16
LONGEST_KEY = 96
ID_BYTES = 16
_RECORD = struct.Struct(f"<4sHHQQQ{NAMESPACE_BYTES}s{LONGEST_KEY}s")
_RECORD_MAGIC = b"KTPG"

_CHECKSUM = struct.Struct("<I")
_FILLING = bytes(HEADER_BYTES - _RECORD.size - _CHECKSUM.size)


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
        fields = _SEGMENT.pack(_SEGMENT_MAGIC, FORMAT_VERSION, 0, self.number, self.slot_bytes, self.capacity)
        return (fields + _CHECKSUM.pack(zlib.crc32(fields))).ljust(FILE_HEADER_BYTES, b"\0")

    def slots_in(self, file_bytes: int) -> int:
        """Slots in a file of that size, a truncated last one included."""
        return min(self.capacity, -(-max(0, file_bytes - FILE_HEADER_BYTES) // self.slot_bytes))


def read_geometry(file: OpenFile, number: int) -> Geometry | None:
    """None if the file is not a segment of this format and number."""
    data = bytearray(FILE_HEADER_BYTES)
    if file.read_into([data], 0) < FILE_HEADER_BYTES:
        return None
    magic, version, _, stored_number, slot_bytes, capacity = _SEGMENT.unpack_from(data)
    right = zlib.crc32(data[: _SEGMENT.size]) == _CHECKSUM.unpack_from(data, _SEGMENT.size)[0]
    if not right or (magic, version, stored_number) != (_SEGMENT_MAGIC, FORMAT_VERSION, number):
        return None
    if slot_bytes < HEADER_BYTES or slot_bytes % _ALIGNMENT or capacity < 1:
        return None
    return Geometry(number, slot_bytes, capacity)


class Fault(enum.Enum):
    """Why the bytes in a slot are not the record that was asked for."""

    EMPTY = "nothing was written there"
    TORN = "the header is damaged or cut off"
    OLD_FORMAT = "another format version"
    FOREIGN = "another namespace's record"
    SWAPPED = "another key's record"
    WRONG_LENGTH = "a payload of another length"
    DAMAGED = "the payload does not match its checksum"


@dataclass(frozen=True)
class Header:
    version: int
    key: bytes
    payload_bytes: int
    sequence: int
    payload_checksum: int
    namespace: bytes


def record_id(namespace: bytes, key: bytes) -> bytes:
    """The record's key in the index, 16 bytes."""
    return hashlib.blake2b(namespace + key, digest_size=ID_BYTES).digest()


def is_key(key: bytes) -> bool:
    """Whether `key` is a valid key: 1 to 96 bytes, none of them zero."""
    return 0 < len(key) <= LONGEST_KEY and b"\0" not in key


def checksum(pieces: Iterable[Buffer]) -> int:
    digest = xxhash.xxh3_64()
    for piece in pieces:
        digest.update(piece)
    return digest.intdigest()


def encode_header(header: Header) -> bytes:
    if not is_key(header.key):
        raise ValueError(f"key {header.key!r}: allowed are 1 to {LONGEST_KEY} bytes without zeros")
    fields = _RECORD.pack(
        _RECORD_MAGIC,
        header.version,
        len(header.key),
        header.payload_bytes,
        header.sequence,
        header.payload_checksum,
        header.namespace,
        header.key,
    )
    return fields + _CHECKSUM.pack(zlib.crc32(fields)) + _FILLING


def decode_header(data: Buffer) -> Header | Fault:
    view = bytes(data[:HEADER_BYTES])
    if len(view) < HEADER_BYTES:
        return Fault.TORN
    if not any(view):
        return Fault.EMPTY
    magic, version, key_length, payload_bytes, sequence, payload_checksum, namespace, key = _RECORD.unpack_from(view)
    if magic != _RECORD_MAGIC or zlib.crc32(view[: _RECORD.size]) != _CHECKSUM.unpack_from(view, _RECORD.size)[0]:
        return Fault.TORN
    if version != FORMAT_VERSION:
        return Fault.OLD_FORMAT
    return Header(version, key[:key_length], payload_bytes, sequence, payload_checksum, namespace)


def check_record(data: Buffer, payload: Iterable[Buffer], namespace: bytes, key: bytes) -> Fault | None:
    """None if `data` (a header) and `payload` are the record of `namespace` and `key`."""
    header = decode_header(data)
    if isinstance(header, Fault):
        return header
    if header.namespace != namespace:
        return Fault.FOREIGN
    if header.key != key:
        return Fault.SWAPPED
    pieces = list(payload)
    if header.payload_bytes != sum(len(piece) for piece in pieces):
        return Fault.WRONG_LENGTH
    return None if checksum(pieces) == header.payload_checksum else Fault.DAMAGED


def check_slot(data: Buffer, record: bytes) -> Fault | None:
    """None if `data`, which begins with a header, holds the record with that id, of any namespace."""
    header = decode_header(data)
    if isinstance(header, Fault):
        return header
    if record_id(header.namespace, header.key) != record:
        return Fault.SWAPPED
    payload = memoryview(data)[HEADER_BYTES : HEADER_BYTES + header.payload_bytes]
    return check_record(data, [payload], header.namespace, header.key)


@dataclass(frozen=True, kw_only=True)
class Namespace:
    """What else pages depend on besides their tokens: two servers share pages exactly when their namespaces are equal.

    `weights`: fingerprint of the model's weights. `configuration`: hash of whatever else changes KV (rope scaling,
    context length, attention backend). `layout`: order of the bytes in a page ("page_first_direct").
    `shard`: which part of a page this process holds ("0/1": rank 0 of 1).
    `adapter`: content hash of the adapter version, or "" where the page keys contain it already.
    """

    weights: str
    kv_dtype: str
    page_tokens: int
    layout: str
    configuration: str = ""
    adapter: str = ""
    shard: str = "0/1"

    def __post_init__(self) -> None:
        for name in ("weights", "kv_dtype", "layout"):
            if not getattr(self, name):
                raise InvalidValueError(f"cache namespace: {name} is empty; pages of different models would mix")
        if self.page_tokens < 1:
            raise InvalidValueError(f"cache namespace: page_tokens is {self.page_tokens}; allowed: 1 and more")

    def digest(self) -> bytes:
        """16 bytes. Each field is hashed with its name and length, so that no two sets of fields run together."""
        digest = hashlib.blake2b(f"kt-runtime page {FORMAT_VERSION}".encode(), digest_size=NAMESPACE_BYTES)
        for field in fields(self):
            value = str(getattr(self, field.name)).encode()
            digest.update(f"{field.name}:{len(value)}:".encode() + value)
        return digest.digest()
