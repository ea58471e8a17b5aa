"""The records in a cache directory as they lie on the disk, and what may happen to them there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kt_runtime.cache.disk import DiskFiles
from kt_runtime.cache.format import (
    HEADER_BYTES,
    Geometry,
    Header,
    decode_header,
    encode_header,
    read_geometry,
    record_id,
    segment_number,
)


@dataclass(frozen=True)
class Placed:
    path: Path
    geometry: Geometry
    offset: int
    header: Header

    @property
    def name_quarantined(self) -> str:
        return f"{record_id(self.header.namespace, self.header.key).hex()}.bad"


def placed(directory: Path) -> list[Placed]:
    """Whatever is a record, in the order in which they were written."""
    found: list[Placed] = []
    for path in sorted((directory / "segments").iterdir()):
        number = segment_number(path.name)
        assert number is not None
        file = DiskFiles().open(path)
        try:
            geometry = read_geometry(file, number)
            for slot in range(geometry.slots_in(file.size()) if geometry is not None else 0):
                assert geometry is not None
                data = bytearray(HEADER_BYTES)
                file.read_into([data], geometry.offset(slot))
                header = decode_header(data)
                if isinstance(header, Header):
                    found.append(Placed(path, geometry, geometry.offset(slot), header))
        finally:
            file.close()
    return sorted(found, key=lambda each: each.header.sequence)


# What happens to a record; each function gets a prompt's records and damages the one at `position`


def flip_a_bit(records: Sequence[Placed], position: int) -> None:
    at = records[position].offset + HEADER_BYTES + 1000
    _overwrite(records[position].path, at, bytes([_read(records[position].path, at, 1)[0] ^ 8]))


def cut_off(records: Sequence[Placed], position: int) -> None:
    with records[position].path.open("r+b") as file:
        file.truncate(records[position].offset + HEADER_BYTES + 1000)


def make_empty(records: Sequence[Placed], position: int) -> None:
    with records[position].path.open("r+b") as file:
        file.truncate(0)


def make_foreign(records: Sequence[Placed], position: int) -> None:
    _rewrite_header(records[position], namespace=b"another model's ")


def make_old(records: Sequence[Placed], position: int) -> None:
    _rewrite_header(records[position], version=records[position].header.version - 1)


def swap_with_next(records: Sequence[Placed], position: int) -> None:
    one, other = records[position], records[position + 1]
    size = one.geometry.slot_bytes
    first, second = _read(one.path, one.offset, size), _read(other.path, other.offset, size)
    _overwrite(one.path, one.offset, second)
    _overwrite(other.path, other.offset, first)


DAMAGES: dict[str, Callable[[Sequence[Placed], int], None]] = {
    "a bit flipped": flip_a_bit,
    "of a foreign model": make_foreign,
    "of an old format": make_old,
    "swapped with another": swap_with_next,
    "cut off": cut_off,
    "of length zero": make_empty,
}


def _rewrite_header(record: Placed, **changes: object) -> None:
    _overwrite(record.path, record.offset, encode_header(dataclasses.replace(record.header, **changes)))  # type: ignore[arg-type]


def _read(path: Path, offset: int, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(size)


def _overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)
