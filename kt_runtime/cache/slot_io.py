"""Moves pages between memory and neighbouring slots of a segment: one system call for many records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kt_runtime.cache.catalog import parts
from kt_runtime.cache.filesystem import OpenFile
from kt_runtime.cache.page import Page
from kt_runtime.cache.record import (
    FORMAT_VERSION,
    HEADER_BYTES,
    Buffer,
    Fault,
    Header,
    check,
    checksum,
    encode_header,
)
from kt_runtime.cache.segment import Geometry, slot_bytes_for


def page_in_slot(key: bytes, slot: memoryview, payload_bytes: int) -> Page:
    """A page to read into memory of `slot_bytes_for(payload_bytes)`. The memory covers the whole slot, so that slots of
    whole blocks are read from the disk without a copy through the page cache."""
    return Page(key, [slot[HEADER_BYTES : HEADER_BYTES + payload_bytes]], slot)


@dataclass(frozen=True)
class Fetched:
    """`page` and its record's header as read from the slot at `place`, both unchecked. There is no header where the
    slot has another record size."""

    page: Page
    place: int
    header: Buffer | None

    def check(self, namespace: bytes) -> Fault | None:
        """None if it is the expected record."""
        if self.header is None:
            return Fault.WRONG_LENGTH
        return check(self.header, self.page.pieces, namespace, self.page.key)


def fetch_slots(file: OpenFile, geometry: Geometry, group: Sequence[tuple[Page, int]]) -> list[Fetched]:
    """Fills the pages, all of one size, from their neighbouring slots."""
    payload_bytes = group[0][0].payload_bytes
    if slot_bytes_for(payload_bytes) != geometry.slot_bytes:
        return [Fetched(page, place, None) for page, place in group]
    fetched: list[Fetched] = []
    pieces: list[bytearray | memoryview] = []
    padding = bytearray(geometry.slot_bytes - HEADER_BYTES - payload_bytes)
    for page, place in group:
        header = bytearray(HEADER_BYTES) if page.slot is None else page.slot[:HEADER_BYTES]
        header[:] = bytes(HEADER_BYTES)  # erases old memory contents: a truncated file has no header here
        fetched.append(Fetched(page, place, header))
        pieces += [header, *page.pieces, padding] if page.slot is None else [page.slot]
    _, first_slot = parts(group[0][1])
    file.read_into(pieces, geometry.offset(first_slot))
    return fetched


def write_slots(
    file: OpenFile, geometry: Geometry, first_slot: int, pages: Sequence[Page], namespace: bytes, sequence: int
) -> None:
    """Writes `pages`, which fit the slots, from `first_slot` on. Their sequences count up from `sequence`."""
    pieces: list[Buffer] = []
    for number, page in enumerate(pages, sequence):
        size = page.payload_bytes
        header = Header(FORMAT_VERSION, page.key, size, number, checksum(page.pieces), namespace)
        pieces += [encode_header(header), *page.pieces, bytes(geometry.slot_bytes - HEADER_BYTES - size)]
    file.write_from(pieces, geometry.offset(first_slot))
