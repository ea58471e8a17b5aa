"""Moving pages between memory and neighbouring slots of a segment: one call of the system for many records."""

from __future__ import annotations

from collections.abc import Sequence

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


def read_slots(
    file: OpenFile, geometry: Geometry, first_slot: int, pages: Sequence[Page], namespace: bytes
) -> list[Fault | None]:
    """Fills `pages`, all of one size, from that slot on. For each: None if it is the right record, else its fault."""
    payload_bytes = pages[0].payload_bytes
    if slot_bytes_for(payload_bytes) != geometry.slot_bytes:
        return [Fault.WRONG_LENGTH] * len(pages)
    headers = [bytearray(HEADER_BYTES) for _ in pages]
    padding = bytearray(geometry.slot_bytes - HEADER_BYTES - payload_bytes)
    pieces: list[bytearray | memoryview] = []
    for header, page in zip(headers, pages, strict=True):
        pieces += [header, *page.pieces, padding]
    file.read_into(pieces, geometry.offset(first_slot))
    return [check(header, page.pieces, namespace, page.key) for header, page in zip(headers, pages, strict=True)]


def write_slots(
    file: OpenFile, geometry: Geometry, first_slot: int, pages: Sequence[Page], namespace: bytes, sequence: int
) -> None:
    """Writes `pages`, which fit the slots, from that slot on; `sequence` is the first one's, and the others' follow."""
    pieces: list[Buffer] = []
    for number, page in enumerate(pages, sequence):
        size = page.payload_bytes
        header = Header(FORMAT_VERSION, page.key, size, number, checksum(page.pieces), namespace)
        pieces += [encode_header(header), *page.pieces, bytes(geometry.slot_bytes - HEADER_BYTES - size)]
    file.write_from(pieces, geometry.offset(first_slot))
