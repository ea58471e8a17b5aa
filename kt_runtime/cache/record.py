"""One page on disk: a header of 160 bytes, then the payload. Little endian.

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
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import xxhash

FORMAT_VERSION = 1
HEADER_BYTES = 160
NAMESPACE_BYTES = 16
LONGEST_KEY = 96
ID_BYTES = 16

_MAGIC = b"KTPG"
_HEADER = struct.Struct(f"<4sHHQQQ{NAMESPACE_BYTES}s{LONGEST_KEY}s")
_CHECKSUM = struct.Struct("<I")
_FILLING = bytes(HEADER_BYTES - _HEADER.size - _CHECKSUM.size)

Buffer: TypeAlias = bytes | bytearray | memoryview


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
    fields = _HEADER.pack(
        _MAGIC,
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
    magic, version, key_length, payload_bytes, sequence, payload_checksum, namespace, key = _HEADER.unpack_from(view)
    if magic != _MAGIC or zlib.crc32(view[: _HEADER.size]) != _CHECKSUM.unpack_from(view, _HEADER.size)[0]:
        return Fault.TORN
    if version != FORMAT_VERSION:
        return Fault.OLD_FORMAT
    return Header(version, key[:key_length], payload_bytes, sequence, payload_checksum, namespace)


def check(data: Buffer, payload: Iterable[Buffer], namespace: bytes, key: bytes) -> Fault | None:
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


def check_slot(data: bytearray, record: bytes) -> Fault | None:
    """None if `data`, which begins with a header, holds the record with that id, of any namespace."""
    header = decode_header(data)
    if isinstance(header, Fault):
        return header
    if record_id(header.namespace, header.key) != record:
        return Fault.SWAPPED
    payload = memoryview(data)[HEADER_BYTES : HEADER_BYTES + header.payload_bytes]
    return check(data, [payload], header.namespace, header.key)
