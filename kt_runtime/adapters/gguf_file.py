"""The GGUF container, parsed from untrusted bytes.

Format (https://github.com/ggml-org/ggml, docs/gguf.md), all little-endian, `string` = u64 length and UTF-8 bytes:

    "GGUF", u32 version (2 or 3), u64 number of tensors, u64 number of keys
    per key:     string name, u32 type, value           an array is u32 type, u64 length, values
    per tensor:  string name, u32 dimensions, u64 length of each (the innermost first), u32 type, u64 offset
    zeros up to a multiple of `general.alignment` (32 without that key); from there offsets count
    the tensors in the order of the list, each padded to that alignment

The whole header is checked before any tensor data is used: lengths, types, duplicate names, and, as ggml requires, that
the tensors follow each other without gap or overlap. The `gguf` package writes our files and names the tensors, but
does not read here: its reader trusts lengths (an array that claims 2^60 entries keeps it busy for ever).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kt_runtime.errors import AdapterError

MAX_HEADER_BYTES = 16 << 20
"""Keys and tensor list of an adapter; a model's vocabulary has no place in one."""

_DEFAULT_ALIGNMENT = 32
_MAX_ALIGNMENT = 1 << 16
_MAX_DIMENSIONS = 4
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_DTYPES = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}


@dataclass(frozen=True)
class GgufFile:
    """`values`: scalars and strings by key, of arrays only the length. `tensors`: views of the file's bytes, with the
    outermost dimension first."""

    values: Mapping[str, Any]
    arrays: Mapping[str, int]
    tensors: Mapping[str, torch.Tensor]


def parse_gguf(data: bytearray | memoryview, where: str) -> GgufFile:
    """`data` is a whole file. Raises AdapterError, beginning with `where`, if anything is wrong."""
    cursor = _Cursor(data, where)
    if cursor.take(4) != b"GGUF":
        raise AdapterError(f"{where}: no GGUF file: begins with {bytes(data[:4])!r}, not b'GGUF'")
    version = cursor.number("I")
    if version not in (2, 3):
        kind = "big-endian" if version and not version & 0xFFFF else f"version {version}"
        raise AdapterError(f"{where}: is {kind}; versions 2 and 3, little-endian, are read")
    num_tensors, num_keys = cursor.number("Q"), cursor.number("Q")
    values: dict[str, Any] = {}
    arrays: dict[str, int] = {}
    for _ in range(num_keys):
        _read_key(cursor, values, arrays)
    entries: dict[str, _Entry] = {}
    for _ in range(num_tensors):
        name, entry = _read_entry(cursor)
        if name in entries:
            raise AdapterError(f"{where}: tensor {name!r} appears twice")
        entries[name] = entry
    return GgufFile(values, arrays, _views(data, cursor, _alignment(values, where), entries))


@dataclass(frozen=True)
class _Entry:
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class _Cursor:
    """Reads forwards, never beyond the end or the largest header size, so that no claimed length can cost much."""

    def __init__(self, data: bytearray | memoryview, where: str) -> None:
        self.data, self.where, self.position = data, where, 0

    def take(self, count: int) -> bytes:
        stop = self.position + count
        if stop > len(self.data):
            raise AdapterError(f"{self.where}: truncated: needs {stop} bytes for what it lists, has {len(self.data)}")
        if stop > MAX_HEADER_BYTES:
            raise AdapterError(f"{self.where}: its keys and tensor list take more than {MAX_HEADER_BYTES} bytes")
        taken = bytes(self.data[self.position : stop])
        self.position = stop
        return taken

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        text = self.take(self.number("Q"))
        try:
            return text.decode()
        except UnicodeDecodeError:
            raise AdapterError(f"{self.where}: {text[:80]!r} is not UTF-8") from None


def _read_key(cursor: _Cursor, values: dict[str, Any], arrays: dict[str, int]) -> None:
    key, kind = cursor.string(), cursor.number("I")
    if key in values or key in arrays:
        raise AdapterError(f"{cursor.where}: key {key!r} appears twice")
    if kind == _STRING:
        values[key] = cursor.string()
    elif kind in _SCALARS:
        values[key] = cursor.number(_SCALARS[kind])
    elif kind == _ARRAY:
        arrays[key] = _skip_array(cursor, key)
    else:
        raise AdapterError(f"{cursor.where}: key {key!r} has the unknown type {kind}")


def _skip_array(cursor: _Cursor, key: str) -> int:
    kind, length = cursor.number("I"), cursor.number("Q")
    if kind in _SCALARS:
        cursor.take(length * struct.calcsize("<" + _SCALARS[kind]))
    elif kind == _STRING:
        for _ in range(length):
            cursor.take(cursor.number("Q"))
    else:
        raise AdapterError(f"{cursor.where}: key {key!r} is an array of type {kind}; expected numbers or strings")
    return int(length)


def _read_entry(cursor: _Cursor) -> tuple[str, _Entry]:
    name, dimensions = cursor.string(), cursor.number("I")
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise AdapterError(f"{cursor.where}: tensor {name!r} has {dimensions} dimensions; expected 1 to 4")
    lengths = [cursor.number("Q") for _ in range(dimensions)]
    if 0 in lengths:
        raise AdapterError(f"{cursor.where}: tensor {name!r} is empty: its dimensions are {lengths}")
    kind, offset = cursor.number("I"), cursor.number("Q")
    if kind not in _DTYPES:
        raise AdapterError(
            f"{cursor.where}: tensor {name!r} is of type {_type_name(kind)}; F32, F16 and BF16 are read: convert the "
            "adapter with --outtype f32"
        )
    return name, _Entry(_DTYPES[kind], tuple(reversed(lengths)), offset)


def _type_name(kind: int) -> str:
    from gguf import GGMLQuantizationType

    return GGMLQuantizationType(kind).name if kind in set(GGMLQuantizationType) else f"{kind}, which is unknown"


def _alignment(values: Mapping[str, Any], where: str) -> int:
    alignment = values.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment not in {1 << bit for bit in range(3, _MAX_ALIGNMENT.bit_length())}:
        raise AdapterError(f"{where}: general.alignment is {alignment!r}; expected a power of two from 8 to 65536")
    return alignment


def _views(
    data: bytearray | memoryview, cursor: _Cursor, alignment: int, entries: Mapping[str, _Entry]
) -> Mapping[str, torch.Tensor]:
    start, offset, tensors = _round_up(cursor.position, alignment), 0, {}
    for name, entry in entries.items():
        if entry.offset != offset:
            raise AdapterError(f"{cursor.where}: tensor {name!r} has offset {entry.offset}; expected {offset}")
        stop = start + offset + entry.num_bytes
        if stop > len(data):
            raise AdapterError(f"{cursor.where}: truncated: tensor {name!r} ends at byte {stop} of {len(data)}")
        tensors[name] = _view(data, start + offset, entry)
        offset += _round_up(entry.num_bytes, alignment)
    if len(data) > max(start + offset, cursor.position):
        raise AdapterError(
            f"{cursor.where}: {len(data) - start - offset} bytes after the last tensor belong to no tensor"
        )
    return tensors


def _view(data: bytearray | memoryview, position: int, entry: _Entry) -> torch.Tensor:
    count = math.prod(entry.shape)
    return torch.frombuffer(data, dtype=entry.dtype, count=count, offset=position).reshape(entry.shape)


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
