"""The safetensors format, read from bytes that somebody else made, and written without a second copy in memory.

Format (https://github.com/huggingface/safetensors, "Format"): 8 bytes, little-endian, length N of the header; N bytes
of JSON, `{"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, "__metadata__": {...}}`, perhaps
padded with spaces; then the data, to whose beginning the offsets refer. Example with one float32 of value 1.0:

    3b 00 00 00 00 00 00 00  {"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}    00 00 80 3f

Everything in the header is checked before any of the data is touched: lengths, types, duplicate names, that the tensors
cover the data without gap or overlap, and that each has as many bytes as its shape and dtype say.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kt_runtime.errors import AdapterError

MAX_HEADER_BYTES = 100_000_000  # the reference implementation's limit
_MAX_DIMENSIONS = 8

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
FLOAT_DTYPES = ("F32", "BF16", "F16")
_NAME_OF = {dtype: name for name, dtype in DTYPES.items()}


class Entry(NamedTuple):
    """One tensor of a checked header; offsets count from the beginning of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def parse_header(data: bytearray, where: str, dtypes: Collection[str] = FLOAT_DTYPES) -> dict[str, Entry]:
    """The tensors of a whole file in memory. Raises AdapterError, beginning with `where`, if anything is wrong."""
    if len(data) < 8:
        raise AdapterError(f"{where}: truncated: {len(data)} bytes, the length of the header alone takes 8")
    length = int.from_bytes(data[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise AdapterError(f"{where}: the header claims {length} bytes; at most {MAX_HEADER_BYTES} are accepted")
    if 8 + length > len(data):
        raise AdapterError(f"{where}: truncated in the header: it claims {length} bytes, {len(data) - 8} are there")
    header = _decode(bytes(data[8 : 8 + length]), where)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise AdapterError(f"{where}: header: '__metadata__' must map names to text")
    first = 8 + length
    entries = {name: _entry(name, value, first, len(data), dtypes, where) for name, value in header.items()}
    _check_coverage(entries, first, len(data), where)
    return entries


def read_tensors(data: bytearray, where: str, dtypes: Collection[str] = FLOAT_DTYPES) -> dict[str, torch.Tensor]:
    """The tensors of a whole file in memory, as views of `data`. Raises AdapterError as `parse_header`."""
    tensors = {}
    for name, entry in parse_header(data, where, dtypes).items():
        dtype, count = DTYPES[entry.dtype], math.prod(entry.shape)
        if count:
            flat = torch.frombuffer(data, dtype=dtype, count=count, offset=entry.start)
            tensors[name] = flat.reshape(entry.shape)
        else:
            tensors[name] = torch.empty(entry.shape, dtype=dtype)
    return tensors


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> None:
    """Writes a new file at `path`, one tensor after the other, each converted to `dtype` if given. Does not fsync."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        stored = dtype or tensor.dtype
        size = tensor.numel() * stored.itemsize
        header[name] = {
            "dtype": _NAME_OF[stored],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            stored_tensor = tensor.detach().to("cpu", dtype or tensor.dtype).contiguous()
            file.write(stored_tensor.reshape(-1).view(torch.uint8).numpy().data)


def _decode(text: bytes, where: str) -> dict[str, Any]:
    def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for name, value in pairs:
            if name in result:
                raise AdapterError(f"{where}: header: {name!r} appears twice")
            result[name] = value
        return result

    try:
        header = json.loads(text, object_pairs_hook=refuse_duplicates)
    except AdapterError:
        raise
    except (ValueError, RecursionError) as error:  # an integer of more digits than Python reads is a ValueError
        raise AdapterError(f"{where}: the header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise AdapterError(f"{where}: the header is not a JSON object")
    return header


def _entry(name: str, value: Any, first: int, size: int, dtypes: Collection[str], where: str) -> Entry:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise AdapterError(f"{where}: header: {name!r} must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if dtype not in DTYPES or dtype not in dtypes:
        raise AdapterError(f"{where}: {name!r} has dtype {dtype!r}; expected one of {', '.join(dtypes)}")
    if not _are_counts(shape) or len(shape) > _MAX_DIMENSIONS:
        raise AdapterError(f"{where}: header: {name!r} has shape {str(shape)[:80]}; expected a list of lengths")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise AdapterError(f"{where}: header: {name!r} has data_offsets {str(offsets)[:80]}; expected [begin, end]")
    begin, end = first + offsets[0], first + offsets[1]
    if end > size:
        raise AdapterError(
            f"{where}: truncated, or offsets out of range: {name!r} ends at byte {end}, the file has {size}"
        )
    needed = math.prod(shape) * DTYPES[dtype].itemsize
    if end - begin != needed:
        raise AdapterError(f"{where}: {name!r} has {end - begin} bytes; shape {shape} of {dtype} needs {needed}")
    return Entry(dtype, tuple(shape), begin, end)


LARGEST_COUNT = 2**64 - 1


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(
        isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST_COUNT for value in values
    )


def _check_coverage(entries: Mapping[str, Entry], first: int, size: int, where: str) -> None:
    position, previous = first, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != position:
            problem = "overlaps" if entry.start < position else "leaves a gap after"
            raise AdapterError(f"{where}: {name!r} (byte {entry.start}) {problem} {previous} (to byte {position})")
        position, previous = entry.stop, repr(name)
    if position != size:
        raise AdapterError(f"{where}: {size - position} bytes after the last tensor belong to none")
