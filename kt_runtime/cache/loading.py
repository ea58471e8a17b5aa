"""Builds a catalog from the files of a cache directory: from the index or, if that is damaged, from the records."""

from __future__ import annotations

import errno
import logging
from pathlib import Path

from kt_runtime.cache.catalog import Catalog
from kt_runtime.cache.filesystem import FileSystem, OpenFile
from kt_runtime.cache.index_log import PUT, IndexLog
from kt_runtime.cache.record import HEADER_BYTES, Fault, decode_header, record_id
from kt_runtime.cache.segment import Geometry, read_geometry, segment_name, segment_number

_NO_FILE = (errno.EISDIR, errno.ELOOP)  # a directory, a link

logger = logging.getLogger(__name__)


def open_segments(
    files: FileSystem, directory: Path, catalog: Catalog, *, write: bool
) -> tuple[dict[int, OpenFile], list[str]]:
    """Opens every segment and enters its slots. Also returns the names of files that are no segments of this format."""
    opened: dict[int, OpenFile] = {}
    foreign: list[str] = []
    try:
        for name in sorted(files.names(directory)):
            number = segment_number(name)
            if number is None or name != segment_name(number):
                foreign.append(name)
                continue
            found = _open_segment(files, directory / name, number, write=write)
            if found is None:
                foreign.append(name)
            else:
                opened[number], geometry = found
                catalog.add_segment(geometry, geometry.slots_in(opened[number].size()))
    except BaseException:
        for file in opened.values():
            file.close()
        raise
    return opened, foreign


def _open_segment(files: FileSystem, path: Path, number: int, *, write: bool) -> tuple[OpenFile, Geometry] | None:
    """None if it is no segment of this format. Raises other OSErrors, which say nothing about the file's content."""
    try:
        file = files.open(path, write=write)
    except OSError as error:
        if error.errno in _NO_FILE:
            return None
        raise
    geometry = None
    try:
        geometry = read_geometry(file, number)
    except OSError as error:
        if error.errno not in _NO_FILE:
            raise
    finally:
        if geometry is None:
            file.close()
    return None if geometry is None else (file, geometry)


def replay(index: IndexLog, catalog: Catalog) -> bool:
    """False if the index is unreliable. Entries for slots beyond the end of a truncated segment are left out."""
    catalog.load_changes(index.replay())
    has_slots = any(segment.owners for segment in catalog.segments.values())
    return not index.is_damaged and not (has_slots and index.num_changes == 0)


def scan(opened: dict[int, OpenFile], catalog: Catalog) -> int:
    """Enters the records found in the slots, in the order in which they were written; returns their number.

    Reads headers only: a payload is checked when it is used.
    """
    found: list[tuple[int, int, int, bytes]] = []
    for number, file in opened.items():
        segment = catalog.segments[number]
        for slot in range(len(segment.owners)):
            record = _record_in(file, segment.geometry, slot)
            if record is not None:
                found.append((record[0], number, slot, record[1]))
    catalog.load_changes((PUT, number, slot, record) for _, number, slot, record in sorted(found))
    logger.warning("the cache's index was damaged; %d records were found again in its segments", len(catalog))
    return len(catalog)


def _record_in(file: OpenFile, geometry: Geometry, slot: int) -> tuple[int, bytes] | None:
    """The (sequence, id) of the slot's record."""
    data = bytearray(HEADER_BYTES)
    try:
        file.read_into([data], geometry.offset(slot))
    except OSError:
        return None
    header = decode_header(data)
    if isinstance(header, Fault):
        return None
    return header.sequence, record_id(header.namespace, header.key)
