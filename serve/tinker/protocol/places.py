"""Finds the run and the `seq_id` of a training call whose body is too large, or wrong, from its first and last bytes.

Protobuf has both before the data (fields 1 and 2 of `ForwardBackwardRequest`, which every implementation writes in the
order of their numbers). JSON of the older SDK has them behind it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import zstandard

DECOMPRESSED_BYTES = 4096  # of the head: a model's id and a number
LONGEST_ID_BYTES = 256
MODEL_TAG, SEQ_TAG = b"\x0a", b"\x10"  # field 1, length-delimited; field 2, varint
_MODEL = re.compile(rb'"model_id"\s*:\s*"([^"\\\\]{1,256})"')
_SEQ = re.compile(rb'"seq_id"\s*:\s*([0-9]{1,9})\s*[,}]')


@dataclass(frozen=True)
class CallPlace:
    model_id: str
    seq_id: int


def place_of_call(head: bytes, tail: bytes, *, is_protobuf: bool, is_zstd: bool) -> CallPlace | None:
    """None if the bytes don't say. `head`, `tail`: the body's first and last bytes, which may overlap."""
    if is_zstd:
        head, tail = _beginning(head), b""
    if is_protobuf:
        return _of_protobuf(head)
    models = {found for part in (head, tail) for found in _MODEL.findall(part)}
    places = {found for part in (head, tail) for found in _SEQ.findall(part)}
    if len(models) != 1 or len(places) != 1:
        return None
    return CallPlace(models.pop().decode("utf-8", "replace"), int(places.pop()))


def _of_protobuf(head: bytes) -> CallPlace | None:
    if head[:1] != MODEL_TAG:
        return None
    length, at = _varint(head, 1)
    if length is None or not 0 < length <= LONGEST_ID_BYTES or head[at + length : at + length + 1] != SEQ_TAG:
        return None
    seq_id, _ = _varint(head, at + length + 1)
    return None if seq_id is None else CallPlace(head[at : at + length].decode("utf-8", "replace"), seq_id)


def _varint(data: bytes, at: int) -> tuple[int | None, int]:
    """(value, the position behind it). None for a value that is cut off or has more than 32 bits."""
    value = 0
    for index, byte in enumerate(data[at : at + 5]):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return (value if value < 1 << 31 else None), at + index + 1
    return None, at


def _beginning(compressed: bytes) -> bytes:
    try:
        with zstandard.ZstdDecompressor().stream_reader(compressed) as reader:
            return bytes(reader.read(DECOMPRESSED_BYTES))
    except (zstandard.ZstdError, MemoryError):
        return b""
