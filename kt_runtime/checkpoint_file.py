"""Reads one untrusted file of a checkpoint: JSON, or the header of a safetensors file.

The whole safetensors header is checked before any data is used.

Format (https://github.com/huggingface/safetensors, "Format"): 8 bytes, little-endian, length N of the header; N bytes
of JSON, `{"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, "__metadata__": {...}}`, perhaps
padded with spaces; then the data, to whose beginning the offsets refer. Example with one float32 of value 1.0:

    3b 00 00 00 00 00 00 00  {"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}    00 00 80 3f

The checks: lengths and types are valid; no name appears twice; the tensors cover the data without gap or overlap; each
tensor has as many bytes as its shape and dtype need. msgspec parses the JSON strictly and rejects a header at the first
unexpected value. Of two equal names, however, msgspec keeps only the last. So Python's json, which reports both, parses
the header a second time, once msgspec has found its structure harmless. Both parsers together take at most
MEMORY_FACTOR bytes for each byte of the header.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec

from kt_runtime.errors import CheckpointError, KtError, NotFoundError
from kt_runtime.files import open_regular, parse_json, read_at, read_regular

MAX_HEADER_BYTES = 100_000_000  # the reference implementation's limit
MAX_JSON_BYTES = MAX_HEADER_BYTES
MEMORY_FACTOR = 30
"""Upper bound on bytes of memory per byte of header, the header itself included; a real model's header takes 8."""

DTYPE_BYTES: Mapping[str, int] = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
}
_METADATA = "__metadata__"
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]  # the format's integers


class Entry(NamedTuple):
    """One tensor of a checked header; offsets count from the beginning of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class _Stored(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    dtype: str
    shape: Annotated[tuple[_Count, ...], msgspec.Meta(max_length=8)]
    data_offsets: tuple[_Count, _Count]


_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_stored = msgspec.json.Decoder(_Stored)
_metadata = msgspec.json.Decoder(dict[str, str])


@contextlib.contextmanager
def open_tensors(path: Path) -> Iterator[tuple[int, dict[str, Entry]]]:
    """Yields a descriptor of the safetensors file at `path`, and its tensors in header order.

    Raises NotFoundError, and CheckpointError for a file that can't be read or that contradicts its header.
    """
    with _errors_of(path), open_regular(path) as descriptor:
        file_bytes = os.fstat(descriptor).st_size
        length = header_bytes(read_at(descriptor, 8, 0), file_bytes)
        entries = parse_header(read_at(descriptor, length, 8), file_bytes)
        yield descriptor, entries


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of the safetensors file at `path`. Raises as `open_tensors`."""
    with open_tensors(path) as (_, entries):
        return entries


def read_json(path: Path) -> Any:
    """A JSON file such as config.json. Raises NotFoundError, and CheckpointError for a file that can't be read."""
    with _errors_of(path):
        content = read_regular(path, MAX_JSON_BYTES)
        try:
            return parse_json(content)
        except ValueError as error:
            raise ValueError(f"not JSON: {error}") from None


@contextlib.contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    try:
        yield
    except KtError:
        raise
    except FileNotFoundError as error:
        raise NotFoundError(f"{path}: {error.strerror}") from None
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read: {error.strerror or error}") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None


def header_bytes(beginning: bytes | bytearray, file_bytes: int, max_header_bytes: int = MAX_HEADER_BYTES) -> int:
    """The header's length, from the first 8 bytes of a file of `file_bytes`. Raises ValueError."""
    if file_bytes < 8:
        raise ValueError(f"truncated: {file_bytes} bytes, the length of the header alone takes 8")
    length = int.from_bytes(beginning[:8], "little")
    if length > max_header_bytes:
        raise ValueError(f"the header claims {length} bytes; at most {max_header_bytes} are accepted")
    if 8 + length > file_bytes:
        raise ValueError(f"truncated in the header: it claims {length} bytes, {file_bytes - 8} are there")
    return length


def parse_header(text: bytes, file_bytes: int, dtypes: Collection[str] = tuple(DTYPE_BYTES)) -> dict[str, Entry]:
    """The tensors of a header, in header order, for a file of `file_bytes`; `dtypes` are the allowed dtypes.

    Raises ValueError. The message names the wrong tensor and the problem, but not the file.
    """
    try:
        members = _members.decode(text)
    except msgspec.ValidationError:
        raise ValueError("the header is not a JSON object") from None
    except RecursionError:
        raise ValueError("the header is not JSON that is accepted: nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"the header is not JSON that is accepted: {error}") from None
    if metadata := members.pop(_METADATA, None):
        _decode(_metadata, metadata, f"header: {_METADATA!r}")
    first = 8 + len(text)
    entries = {}
    while members:  # each raw member is dropped once parsed: keeping both would take twice the memory
        name, raw = members.popitem()
        entries[name] = _entry(name, _decode(_stored, raw, f"header: {name[:80]!r}"), first, file_bytes, dtypes)
    _refuse_duplicates(text)
    in_order = dict(reversed(entries.items()))
    _check_coverage(in_order, first, file_bytes)
    return in_order


_Decoded = TypeVar("_Decoded")


def _decode(decoder: msgspec.json.Decoder[_Decoded], raw: msgspec.Raw, what: str) -> _Decoded:
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        shown = bytes(memoryview(raw)[:80]).decode(errors="replace")
        raise ValueError(f"{what} is {shown}: {error}") from None


def _refuse_duplicates(text: bytes) -> None:
    """Raises ValueError for a name that appears twice. The caller has checked the header's structure already."""

    def check(pairs: list[tuple[str, None]]) -> None:
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"header: {name[:80]!r} appears twice")
            seen.add(name)

    json.loads(text.decode(), object_pairs_hook=check)


def _entry(name: str, stored: _Stored, first: int, file_bytes: int, dtypes: Collection[str]) -> Entry:
    dtype, shape, (begin, end) = stored.dtype, stored.shape, stored.data_offsets
    if dtype not in dtypes:
        raise ValueError(f"{name[:80]!r} has dtype {dtype[:80]!r}; expected one of {', '.join(dtypes)}")
    if begin > end:
        raise ValueError(f"header: {name[:80]!r} has data_offsets [{begin}, {end}]; expected [begin, end]")
    if first + end > file_bytes:
        raise ValueError(
            f"truncated (is the download complete?), or offsets out of range: {name[:80]!r} ends at byte {first + end},"
            f" the file has {file_bytes}"
        )
    needed = math.prod(shape) * DTYPE_BYTES[dtype]
    if end - begin != needed:
        raise ValueError(f"{name[:80]!r} has {end - begin} bytes; shape {list(shape)} of {dtype} needs {needed}")
    # Without elements, too: libraries compute a tensor's strides from its other sizes.
    if math.prod(max(1, size) for size in shape) * DTYPE_BYTES[dtype] >= 1 << 63:
        raise ValueError(f"{name[:80]!r} has shape {list(shape)}, larger than any memory")
    return Entry(sys.intern(dtype), shape, first + begin, first + end)


def _check_coverage(entries: Mapping[str, Entry], first: int, file_bytes: int) -> None:
    position, previous = first, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != position:
            problem = "overlaps" if entry.start < position else "leaves a gap after"
            raise ValueError(f"{name[:80]!r} (byte {entry.start}) {problem} {previous} (to byte {position})")
        position, previous = entry.stop, repr(name[:80])
    if position != file_bytes:
        raise ValueError(f"{file_bytes - position} bytes after the last tensor belong to no tensor")
