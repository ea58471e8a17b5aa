"""Reads the header of an untrusted GGUF file: of a model, which may be split over several files, or of an adapter.

Format (https://github.com/ggml-org/ggml, docs/gguf.md), all little-endian, `string` = u64 length and UTF-8 bytes:

    "GGUF", u32 version (2 or 3), u64 number of tensors, u64 number of keys
    per key:     string name, u32 type, value           an array is u32 type, u64 length, values
    per tensor:  string name, u32 dimensions, u64 length of each (the innermost first), u32 type, u64 offset
    zeros up to a multiple of `general.alignment` (32 without that key); from there offsets count
    the tensors in the order of the list, each padded to that alignment

The whole header is checked before any tensor is used: lengths, types, names that appear twice, and, as ggml requires,
that the tensors follow each other in the order of the list without gap or overlap and end within the file. Every count
is compared with the bytes that are there before memory is taken for it. The `gguf` package writes our files and names
the tensors, but does not read here: its reader trusts lengths (an array that claims 2^60 entries keeps it busy for
ever).

Split files (llama.cpp, `gguf-split`) are named NAME-00001-of-00003.gguf and hold `split.no`, `split.count` and
`split.tensors.count`; the first one has the model's keys.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kt_runtime.checkpoint_file import Entry
from kt_runtime.errors import CheckpointError, KtError, NotFoundError
from kt_runtime.files import open_regular, read_at

SUFFIX = ".gguf"
MAX_ITEMS = 1 << 22  # of an array, or tensors, or keys
MAX_STRING_BYTES = 1 << 24  # a chat template
MAX_FILES = 1000
BLOCKS: Mapping[str, tuple[int, int]] = {
    "F32": (1, 4),
    "F16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
    "BF16": (1, 2),
    "MXFP4": (32, 17),
}
"""Type → weights and bytes of a block. Rows are whole blocks."""

_TYPES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    20: "IQ4_NL",
    23: "IQ4_XS",
    30: "BF16",
    39: "MXFP4",
}
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_LENGTH = struct.Struct("<Q")
_READ_AHEAD = 1 << 20


@dataclass(frozen=True)
class Rules:
    """What a file must keep to, and the class of the error that is raised if it does not.

    `header_bytes`: the most that keys and list of tensors may take. `types`: the allowed ones of `BLOCKS`;
    `advice`: what to do about another type. `least_alignment`: the lowest allowed `general.alignment`. `is_whole`: no
    bytes may follow the last tensor.
    """

    error: type[KtError]
    header_bytes: int
    types: tuple[str, ...] = tuple(BLOCKS)
    advice: str = ""
    least_alignment: int = 1
    is_whole: bool = False


MODEL = Rules(CheckpointError, header_bytes=256 << 20)
"""The header has the tokenizer's vocabulary; it takes 10 MB in files of today."""


@dataclass(frozen=True)
class GgufFile:
    """`keys`: values as Python's; arrays are lists. `tensors`: in the order of the file, the outermost dimension first,
    offsets from the beginning of the file."""

    path: Path
    keys: Mapping[str, Any]
    tensors: Mapping[str, Entry]


@contextlib.contextmanager
def open_gguf(path: Path) -> Iterator[tuple[int, GgufFile]]:
    """Yields a descriptor of the file, and its checked header.

    Raises NotFoundError, and CheckpointError for a file that can't be read or that contradicts its header.
    """
    try:
        with open_regular(path) as descriptor:
            read = partial(read_at, descriptor)
            yield descriptor, _Parser(path, read, os.fstat(descriptor).st_size, MODEL).parse()
    except FileNotFoundError as error:
        raise NotFoundError(f"{path}: {error.strerror}") from None
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read: {error.strerror or error}") from None


def read_gguf(path: Path) -> GgufFile:
    """The header of one file. Raises as `open_gguf`."""
    with open_gguf(path) as (_, file):
        return file


def parse_gguf(data: bytes | bytearray | memoryview, path: Path, rules: Rules) -> GgufFile:
    """The header in `data`, a whole file. Raises the error of `rules`, beginning with `path`, which is not opened."""
    return _Parser(path, lambda count, offset: bytes(data[offset : offset + count]), len(data), rules).parse()


def read_gguf_model(path: Path) -> list[GgufFile]:
    """The headers of a model's files, `path` being its only or any of its split ones; the first has the model's keys.

    Raises NotFoundError for a part that is missing, and CheckpointError for parts that do not belong together.
    """
    given = read_gguf(path)
    count = given.keys.get("split.count", 1)
    if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= MAX_FILES:
        raise CheckpointError(f"{path}: key 'split.count' is {count!r}; expected 1 to {MAX_FILES}")
    if count <= 1:
        return [given]
    match = _SPLIT.fullmatch(path.name)
    if match is None or int(match[3]) != count:
        raise CheckpointError(
            f"{path}: is one of {count} files, but its name does not end in -0000N-of-{count:05}.gguf"
        )
    parts = [path.with_name(f"{match[1]}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise NotFoundError(f"{path.parent}: {len(missing)} of {count} files are missing: {', '.join(missing[:3])}")
    files = [read_gguf(part) for part in parts]
    _check_parts(files)
    return files


def _check_parts(files: list[GgufFile]) -> None:
    found: dict[str, Path] = {}
    for number, file in enumerate(files):
        for key, expected in (("split.no", number), ("split.count", len(files))):
            if file.keys.get(key) != expected:
                raise CheckpointError(f"{file.path}: key {key!r} is {file.keys.get(key)!r}; expected {expected}")
        for name in file.tensors:
            if name in found:
                raise CheckpointError(f"{file.path}: tensor {name[:80]!r} is in {found[name].name} too")
            found[name] = file.path
    claimed = files[0].keys.get("split.tensors.count", len(found))
    if claimed != len(found):
        raise CheckpointError(
            f"{files[0].path}: key 'split.tensors.count' is {claimed!r}; the files have {len(found)} tensors"
        )


class _Parser:
    """Reads forwards, never beyond the file's end or the largest header, so that no claimed length can cost much.

    `read(count, offset)` returns bytes of the file, fewer at its end.
    """

    def __init__(self, path: Path, read: Callable[[int, int], bytes], file_bytes: int, rules: Rules) -> None:
        self._path, self._read, self._file_bytes, self._rules = path, read, file_bytes, rules
        self._limit = min(file_bytes, rules.header_bytes)
        self._at = 0
        self._start, self._buffer = 0, b""

    def parse(self) -> GgufFile:
        if (magic := self._take(4, "the magic number")) != b"GGUF":
            raise self._error(f"no GGUF file: begins with {magic!r}, expected b'GGUF'")
        version = self._number("I", "the version")
        if version not in (2, 3):
            kind = "big-endian" if version and not version & 0xFFFF else f"version {version}"
            raise self._error(f"is {kind}; versions 2 and 3, little-endian, are read")
        num_tensors = self._count("the number of tensors", 25)
        num_keys = self._count("the number of keys", 13)
        keys = self._keys(num_keys)
        infos = [self._tensor_info() for _ in range(num_tensors)]
        return GgufFile(self._path, keys, self._placed(infos, self._alignment(keys)))

    def _keys(self, count: int) -> dict[str, Any]:
        keys: dict[str, Any] = {}
        for _ in range(count):
            name = self._string("the name of a key")
            if name in keys:
                raise self._error(f"key {name[:80]!r} appears twice")
            keys[name] = self._value(f"key {name[:80]!r}")
        return keys

    def _value(self, what: str) -> Any:
        kind = self._number("I", what)
        if kind == _STRING:
            return self._string(what)
        if kind != _ARRAY:
            return self._number(self._scalar(kind, what), what)
        kind = self._number("I", what)
        if kind == _STRING:
            return [self._string(what) for _ in range(self._count(what, 8))]
        letter = self._scalar(kind, what)
        count = self._count(what, struct.calcsize(letter))
        return list(struct.unpack(f"<{count}{letter}", self._take(count * struct.calcsize(letter), what)))

    def _scalar(self, kind: int, what: str) -> str:
        if kind not in _SCALARS:
            raise self._error(f"{what} has type {kind}; expected one of {', '.join(map(str, sorted(_SCALARS)))}, 8, 9")
        return _SCALARS[kind]

    def _tensor_info(self) -> tuple[str, tuple[int, ...], str, int]:
        name = self._string("the name of a tensor")
        what = f"tensor {name[:80]!r}"
        dimensions = self._number("I", what)
        if not 1 <= dimensions <= 4:
            raise self._error(f"{what} has {dimensions} dimensions; expected 1 to 4")
        shape = tuple(self._number("Q", what) for _ in range(dimensions))
        if 0 in shape or math.prod(shape) >= 1 << 60:
            raise self._error(f"{what} has shape {list(shape)[::-1]}; expected 1 to 2^60 weights")
        number, offset = self._number("I", what), self._number("Q", what)
        kind = _TYPES.get(number, "")
        if kind not in self._rules.types:
            expected = ", ".join(self._rules.types) + (f": {self._rules.advice}" if self._rules.advice else "")
            raise self._error(f"{what} has type {_type_name(number)}; expected {expected}")
        if shape[0] % BLOCKS[kind][0]:
            raise self._error(f"{what} has rows of {shape[0]}; expected a multiple of {BLOCKS[kind][0]} for {kind}")
        return name, shape[::-1], kind, offset

    def _alignment(self, keys: Mapping[str, Any]) -> int:
        alignment = keys.get("general.alignment", 32)
        is_number = isinstance(alignment, int) and not isinstance(alignment, bool)
        least = self._rules.least_alignment
        if not is_number or not least <= alignment <= 1 << 16 or alignment & (alignment - 1):
            raise self._error(
                f"key 'general.alignment' is {alignment!r}; expected a power of two from {least} to 65536"
            )
        return int(alignment)

    def _placed(self, infos: list[tuple[str, tuple[int, ...], str, int]], alignment: int) -> dict[str, Entry]:
        first = _round_up(self._at, alignment)
        expected = 0
        tensors: dict[str, Entry] = {}
        for name, shape, kind, offset in infos:
            what = f"tensor {name[:80]!r}"
            if name in tensors:
                raise self._error(f"{what} appears twice")
            if offset != expected:
                raise self._error(f"{what} has offset {offset}; expected {expected}, where the previous one ends")
            per_block, block_bytes = BLOCKS[kind]
            size = math.prod(shape) // per_block * block_bytes
            if first + offset + size > self._file_bytes:
                raise self._error(
                    f"truncated (is the download complete?), or lying sizes: {what} ends at byte "
                    f"{first + offset + size}, the file has {self._file_bytes}"
                )
            tensors[name] = Entry(kind, shape, first + offset, first + offset + size)
            expected = _round_up(offset + size, alignment)
        if self._rules.is_whole and self._file_bytes > first + expected:
            raise self._error(f"{self._file_bytes - first - expected} bytes after the last tensor belong to no tensor")
        return tensors

    def _count(self, what: str, item_bytes: int) -> int:
        """A number of items, of which each takes at least `item_bytes` of the file."""
        count = self._number("Q", what)
        left = self._file_bytes - self._at
        if count > MAX_ITEMS or count * item_bytes > left:
            raise self._error(f"{what}: claims {count} items; at most {min(MAX_ITEMS, left // item_bytes)} fit here")
        return int(count)

    def _string(self, what: str) -> str:
        try:
            return self._string_bytes(what).decode()
        except UnicodeDecodeError as error:
            raise self._error(f"{what}: not UTF-8: {error.reason}") from None

    def _string_bytes(self, what: str) -> bytes:
        """At once where length and bytes are read already: a vocabulary is some hundred thousand texts."""
        first = self._at - self._start + _LENGTH.size
        if first <= len(self._buffer):
            (length,) = _LENGTH.unpack_from(self._buffer, first - _LENGTH.size)
            end = first + length
            if length <= MAX_STRING_BYTES and end <= min(len(self._buffer), self._limit - self._start):
                self._at = self._start + end
                return self._buffer[first:end]
        length = self._number("Q", what)
        if length > MAX_STRING_BYTES:
            raise self._error(f"{what}: claims a text of {length} bytes; at most {MAX_STRING_BYTES} are accepted")
        return self._take(length, what)

    def _number(self, letter: str, what: str) -> Any:
        return struct.unpack(f"<{letter}", self._take(struct.calcsize(letter), what))[0]

    def _take(self, count: int, what: str) -> bytes:
        end = self._at + count
        if end > self._limit:
            limit = f"the file has {self._file_bytes}"
            if end > self._rules.header_bytes:
                limit = f"a header of at most {self._rules.header_bytes} is accepted"
            raise self._error(f"truncated in the header: {what} ends at byte {end}, {limit}")
        if end > self._start + len(self._buffer):
            self._start = self._at
            self._buffer = self._read(max(count, _READ_AHEAD), self._at)
        found = self._buffer[self._at - self._start : end - self._start]
        if len(found) != count:
            raise self._error(f"truncated in the header: {what} ends at byte {end}, the file has become shorter")
        self._at = end
        return found

    def _error(self, problem: str) -> KtError:
        return self._rules.error(f"{self._path}: {problem}")


def _type_name(number: int) -> str:
    from gguf import GGMLQuantizationType  # only an error needs it

    return GGMLQuantizationType(number).name if number in set(GGMLQuantizationType) else str(number)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
