"""Adapters' tensors: reads untrusted safetensors files (`kt_runtime.checkpoint_file` has the format and its checks),
and writes them without a second copy in memory.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from kt_runtime import spare
from kt_runtime.adapters.paths import OpenFile
from kt_runtime.adapters.tensors import ALIGNMENT, on_threads, pieces
from kt_runtime.beside import pause
from kt_runtime.checkpoint_file import MAX_HEADER_BYTES, Entry, header_bytes
from kt_runtime.checkpoint_file import parse_header as parse_checked
from kt_runtime.direct_file import DIRECT_BYTES, DirectWriter
from kt_runtime.errors import AdapterError

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
PART_BYTES = 16 << 20
"""Bytes that a thread reads at once: one thread reads a small adapter."""
Place = tuple[str, str, int]
"""Group and number of a tensor: the group's two names, and the tensor's place in it."""
_NAME_OF = {dtype: name for name, dtype in DTYPES.items()}


def parse_header(
    data: bytearray | memoryview,
    where: str,
    dtypes: Collection[str] = FLOAT_DTYPES,
    max_header_bytes: int = MAX_HEADER_BYTES,
) -> dict[str, Entry]:
    """The tensors of a file in memory. Raises AdapterError, beginning with `where`, if anything is wrong."""
    return _header(lambda num_bytes: bytes(data[:num_bytes]), len(data), where, dtypes, max_header_bytes)


def _header(
    beginning: Callable[[int], bytes], size: int, where: str, dtypes: Collection[str], max_header_bytes: int
) -> dict[str, Entry]:
    """`beginning`: the first bytes, at most `size`."""
    try:
        length = header_bytes(beginning(min(8, size)), size, max_header_bytes)
        return parse_checked(beginning(8 + length)[8:], size, [name for name in dtypes if name in DTYPES])
    except ValueError as error:
        raise AdapterError(f"{where}: {error}") from None


def read_tensors(
    data: bytearray | memoryview,
    where: str,
    dtypes: Collection[str] = FLOAT_DTYPES,
    max_header_bytes: int = MAX_HEADER_BYTES,
) -> dict[str, torch.Tensor]:
    """The tensors of a file in memory, as views of `data`. Raises AdapterError as `parse_header`.

    `max_header_bytes`: parsing takes up to `MEMORY_FACTOR` times as much memory, so a caller that knows the expected
    size passes less.
    """
    tensors = {}
    for name, entry in parse_header(data, where, dtypes, max_header_bytes).items():
        pause()
        dtype, count = DTYPES[entry.dtype], math.prod(entry.shape)
        if count:
            flat = torch.frombuffer(data, dtype=dtype, count=count, offset=entry.start)
            tensors[name] = flat.reshape(entry.shape)
        else:
            tensors[name] = torch.empty(entry.shape, dtype=dtype)
    return tensors


def read_tensor_file(
    file: OpenFile, place: Callable[[str], Place], max_header_bytes: int = MAX_HEADER_BYTES
) -> dict[str, torch.Tensor]:
    """The tensors of an open file in one piece of memory, in the order of the file's header. Raises as `read_tensors`,
    before any tensor is read, and as `OpenFile.spread`.

    `place`: gives a tensor's place in memory from its name. Tensors of the same group lie one after another by number.
    If their dtypes are equal there is no gap: together they are one tensor, without a copy.
    """
    entries = _header(file.beginning, file.size, str(file.path), FLOAT_DTYPES, max_header_bytes)
    places, num_bytes = _places(entries, place)
    memory = spare.array(max(num_bytes, 1))

    def read(names: list[str]) -> None:
        end = max(entries[name].stop for name in names)
        file.spread(entries[names[0]].start, end, (memory[places[name]] for name in names))

    parts = _parts(entries)
    if len(parts) > 1:
        on_threads(read, parts, file.size)
    elif parts:
        read(parts[0])
    file.check_end()
    whole, tensors = torch.from_numpy(memory), {}
    for name, entry in entries.items():
        pause()
        tensors[name] = whole[places[name]].view(DTYPES[entry.dtype]).view(entry.shape)
    return tensors


def _places(entries: Mapping[str, Entry], place: Callable[[str], Place]) -> tuple[dict[str, slice], int]:
    """Each tensor's range of bytes in memory, and the total number of bytes. Names are sorted within their groups: one
    sort of all names would hold the GIL for long."""
    groups: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for name in entries:
        pause()
        first, second, number = place(name)
        groups.setdefault((first, second), []).append((number, name))
    places: dict[str, slice] = {}
    offset = 0
    for members in groups.values():
        offset = -(-offset // ALIGNMENT) * ALIGNMENT
        for _, name in sorted(members):
            pause()
            entry = entries[name]
            itemsize = DTYPES[entry.dtype].itemsize
            begin = -(-offset // itemsize) * itemsize
            offset = begin + entry.stop - entry.start
            places[name] = slice(begin, offset)
    return places, offset


def _parts(entries: Mapping[str, Entry]) -> list[list[str]]:
    """Parts for threads: names of consecutive tensors in the file's order, of about `PART_BYTES` bytes each."""
    parts: list[list[str]] = []
    stop = -1
    for name in sorted(entries, key=lambda name: entries[name].start):
        if entries[name].start >= stop:
            parts.append([])
            stop = entries[name].start + PART_BYTES
        parts[-1].append(name)
    return parts


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> None:
    """Writes a new file at `path`, one tensor after another, each converted to `dtype` if given. Does not fsync.

    A large file is written without the system's page cache.
    """
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
    text = msgspec.json.encode(header)  # json.dumps would hold the GIL for a fifth of a second, of 90,000 tensors
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    with path.open("xb", buffering=-1 if offset < DIRECT_BYTES else 0) as file, contextlib.ExitStack() as stack:
        writer = file if offset < DIRECT_BYTES else stack.enter_context(DirectWriter(file.fileno()))
        writer.write(memoryview(head))
        for tensor in tensors.values():
            for part in pieces(tensor):
                writer.write(part.to(dtype or tensor.dtype).view(torch.uint8).numpy().data)
