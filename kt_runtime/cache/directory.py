"""The open files of one cache directory: lock, index, segments, quarantine.

DIRECTORY/lock            held by the one process that writes
DIRECTORY/index.log       see `index`
DIRECTORY/segments/*.seg  see `format`
DIRECTORY/quarantine/     a few damaged records, for inspection

Several ranks have a part each, with a lock, an index and a quota of its own, and the pages of the rank's heads:

DIRECTORY/rank-0-of-2/    lock, index.log, segments/, quarantine/
DIRECTORY/rank-1-of-2/

No rank can use what another number of ranks has written, so a directory holds the pages of one number only.

Opening builds the catalog from the index or, if the index is damaged, from the records.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from kt_runtime.cache.disk import Counters, DiskFiles, FileSystem, OpenFile
from kt_runtime.cache.format import (
    FORMAT_VERSION,
    HEADER_BYTES,
    Fault,
    Geometry,
    decode_header,
    read_geometry,
    record_id,
    segment_name,
    segment_number,
)
from kt_runtime.cache.index import PUT, Catalog, IndexLog
from kt_runtime.errors import NotFoundError
from kt_runtime.files import empty_buffer

_MOST_QUARANTINED_FILES = 16
_NO_FILE = (errno.EISDIR, errno.ELOOP)  # a directory, a link

_RANK_PART = re.compile(r"rank-(0|[1-9][0-9]*)-of-([1-9][0-9]*)")

logger = logging.getLogger(__name__)


class Quarantine:
    """Damaged records, kept for inspection and never used again.

    `limit_bytes` bounds the directory's content; beyond it, damaged records are only counted.
    """

    def __init__(self, files: FileSystem, directory: Path, limit_bytes: int) -> None:
        self._files, self._directory, self._limit = files, directory, limit_bytes
        self._bytes, self._count = 0, 0

    def open(self) -> None:
        self._files.make_directory(self._directory)
        for name in self._files.names(self._directory):
            file = self._files.open(self._directory / name)
            self._bytes += file.size()
            self._count += 1
            file.close()

    def keep(self, name: str, source: OpenFile, offset: int, size: int) -> None:
        """Copies `size` bytes from `source`, if there is room. Never raises: the record is lost either way."""
        if self._count >= _MOST_QUARANTINED_FILES or self._bytes + size > self._limit:
            return
        data = empty_buffer(size)
        try:
            count = source.read_into([data], offset)
            target = self._files.open(self._directory / name, write=True, create=True)
            try:
                target.truncate(0)
                target.write_from([data[:count]], 0)
            finally:
                target.close()
        except OSError as error:
            logger.debug("a damaged record could not be quarantined: %s", error)
            return
        self._bytes += count
        self._count += 1

    def take_file(self, path: Path, size: int) -> None:
        """Moves a file that is no valid segment here, or deletes it if there is no room."""
        if self._count < _MOST_QUARANTINED_FILES and self._bytes + size <= self._limit:
            self._files.rename(path, self._directory / path.name)
            self._bytes += size
            self._count += 1
        else:
            self._files.remove(path)


class InUse:
    """Closes a resource that other threads may be using: the last user closes it.

    `close` is called once: by `abandon`, or by the last thread inside `using` at that time.
    """

    def __init__(self, close: Callable[[], None]) -> None:
        self._close = close
        self._lock = threading.Lock()
        self._users, self._is_closed = 0, False

    @contextlib.contextmanager
    def using(self) -> Iterator[bool]:
        """The resource stays open inside. Yields False if it was abandoned before."""
        with self._lock:
            is_open = not self._is_closed
            self._users += is_open
        try:
            yield is_open
        finally:
            if is_open:
                with self._lock:
                    self._users -= 1
                    is_last = self._is_closed and self._users == 0
                if is_last:
                    self._close()

    def abandon(self) -> None:
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
            is_last = not was_closed and self._users == 0
        if is_last:
            self._close()


class CacheDirectory:
    """Opens on construction and fills `catalog`. `segments`: file by number. `index` is None only for a reader of a
    directory without one. `index_is_right`: False if the catalog was built from the records instead.

    Raises ConflictError if another process writes to the directory, NotFoundError if `read_only` and there is no cache.
    """

    def __init__(
        self,
        path: Path,
        files: FileSystem,
        catalog: Catalog,
        counters: Counters,
        *,
        quarantine_bytes: int,
        read_only: bool,
    ) -> None:
        self.path, self.read_only = path, read_only
        self._files, self._counters = files, counters
        self.segments: dict[int, OpenFile] = {}
        self.index: IndexLog | None = None
        self.index_is_right = True
        self._has_new_names = True
        self.quarantine = Quarantine(files, path / "quarantine", quarantine_bytes)
        with contextlib.ExitStack() as stack:
            stack.callback(self._close_files)
            self._prepare(stack)
            self._identities = self._current_identities()
            self._load(catalog)
            self._resources = stack.pop_all()

    def _prepare(self, stack: contextlib.ExitStack) -> None:
        if self.read_only:
            if "segments" not in self._names(self.path):
                raise NotFoundError(f"{self.path} is no cache directory: it has no 'segments'")
            return
        self._files.make_directory(self.path)
        self._files.make_directory(self.path / "segments")
        stack.enter_context(self._files.lock(self.path / "lock", f"cache directory {self.path}"))
        self.quarantine.open()

    def _load(self, catalog: Catalog) -> None:
        write = not self.read_only
        self.segments, foreign = _open_segments(self._files, self.path / "segments", catalog, write=write)
        if write or "index.log" in self._names(self.path):
            self.index = IndexLog(self._files, self.path / "index.log", write=write)
        self.index_is_right = self.index is not None and _replay(self.index, catalog)
        if not self.index_is_right and catalog.segments:
            _scan(self.segments, catalog)
        catalog.finish_loading()
        if write:
            self._move_to_quarantine(foreign)

    def _names(self, path: Path) -> list[str]:
        try:
            return self._files.names(path)
        except FileNotFoundError:
            raise NotFoundError(f"{path} does not exist") from None

    def _move_to_quarantine(self, names: list[str]) -> None:
        for name in names:
            path = self.path / "segments" / name
            self._counters.add("corrupt")
            logger.warning("%s is no segment of format %d; quarantined", path, FORMAT_VERSION)
            try:
                size = self._size(path)
                if size is None:
                    self._files.remove(path)  # a link has no content to inspect
                else:
                    self.quarantine.take_file(path, size)
            except OSError as error:
                logger.warning("%s stays where it is: %s", path, error)

    def _size(self, path: Path) -> int | None:
        """None if it can't be opened."""
        try:
            file = self._files.open(path)
        except OSError:
            return None
        try:
            return file.size()
        finally:
            file.close()

    def _current_identities(self) -> tuple[tuple[int, int], ...]:
        paths = [self.path, self.path / "segments"]
        if not self.read_only:
            paths.append(self.path / "lock")
        return tuple(self._files.identity(path) for path in paths)

    def is_in_place(self) -> bool:
        """False if the directory was removed, emptied or replaced since it was opened."""
        try:
            return self._current_identities() == self._identities
        except OSError:
            return False

    def create_segment(self, geometry: Geometry) -> None:
        path = self.path / "segments" / segment_name(geometry.number)
        file = self._files.open(path, write=True, create=True)
        try:
            file.truncate(0)
            file.write_from([geometry.encode()], 0)
        except BaseException:
            file.close()
            raise
        self.segments[geometry.number] = file
        self._has_new_names = True

    def sync_names(self) -> None:
        """Makes the names of new segments durable: they survive a power cut after this returns."""
        if self._has_new_names:
            self._files.sync_directory(self.path / "segments")
            self._files.sync_directory(self.path)
            self._has_new_names = False

    def delete_segment(self, number: int) -> None:
        """The segment must have no readers; its file may be missing. After an OSError the segment is still there."""
        with contextlib.suppress(FileNotFoundError):
            self._files.remove(self.path / "segments" / segment_name(number))
        if number in self.segments:
            self.segments.pop(number).close()

    def probe(self, size: int) -> None:
        """Raises OSError if `size` bytes can't be written now."""
        path = self.path / "probe"
        file = self._files.open(path, write=True, create=True)
        try:
            file.write_from([bytes(size)], 0)
            file.sync()
        finally:
            file.close()
            self._files.remove(path)

    def close(self) -> None:
        """Closes everything and releases the lock. Writes nothing."""
        self._resources.close()

    def _close_files(self) -> None:
        for file in self.segments.values():
            file.close()
        if self.index is not None:
            self.index.close()


def _open_segments(
    files: FileSystem, directory: Path, catalog: Catalog, *, write: bool
) -> tuple[dict[int, OpenFile], list[str]]:
    """Opens every segment and enters its slots in `catalog`.

    Also returns the names of files that are no segments of this format.
    """
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


def _replay(index: IndexLog, catalog: Catalog) -> bool:
    """False if the index is unreliable. Entries for slots beyond the end of a truncated segment are left out."""
    catalog.load_changes(index.replay())
    has_slots = any(segment.owners for segment in catalog.segments.values())
    return not index.is_damaged and not (has_slots and index.num_changes == 0)


def _scan(opened: dict[int, OpenFile], catalog: Catalog) -> int:
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


def part_of_rank(directory: Path, rank: int, num_ranks: int) -> Path:
    """Where rank `rank` of `num_ranks` has its records."""
    return directory if num_ranks == 1 else directory / f"rank-{rank}-of-{num_ranks}"


def is_part_of_rank(name: str) -> bool:
    return _RANK_PART.fullmatch(name) is not None


def parts_of_ranks(directory: Path, files: FileSystem | None = None) -> list[Path]:
    """The caches of ranks in `directory`, in the order of ranks; none where one rank has its records.

    Raises OSError if `directory` can't be read.
    """
    files = files or DiskFiles()
    found = sorted(
        (int(match[2]), int(match[1])) for name in files.names(directory) if (match := _RANK_PART.fullmatch(name))
    )
    paths = [part_of_rank(directory, rank, num_ranks) for num_ranks, rank in found if num_ranks > 1]
    return [path for path in paths if "segments" in files.names(path)]


def numbers_of_ranks(directory: Path) -> set[int]:
    """Each number of ranks whose servers have records in `directory`, or a process that writes there."""
    found = {1} if _is_used(directory) else set()
    return found | {int(path.name.rpartition("-")[2]) for path in parts_of_ranks(directory) if _is_used(path)}


def _is_used(path: Path) -> bool:
    return any((path / "segments").glob("*.seg")) or DiskFiles().lock_holder(path / "lock") is not None
