"""Records in a cache directory, under a quota. Synchronous; raises OSError when the disk does.

Any number of threads may read, one may write. A slot keeps its record while the slot is being read. After `kill -9`
every record survives whose `write` had returned; after a power cut, every record from before the last `sync`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from kt_runtime.cache.directory import CacheDirectory, InUse
from kt_runtime.cache.disk import Counters, DiskFiles, FileSystem
from kt_runtime.cache.format import HEADER_BYTES, Fault, Geometry, check_slot, record_id, slot_bytes_for
from kt_runtime.cache.index import DROP, ENTRY_BYTES, PUT, USE, Catalog, Change, parts
from kt_runtime.cache.page import Fetched, Page, fetch_slots, neighbours, write_slots
from kt_runtime.errors import InvalidValueError
from kt_runtime.files import empty_buffer

SMALLEST_QUOTA = 1 << 20
_HISTORY_BYTES = 256 << 10
_MOST_CHANGES = 100_000
_LARGEST_TRANSFER = 32 << 20

logger = logging.getLogger(__name__)


class PageStore:
    """Opens on construction. Raises ConflictError if another process writes to the directory, InvalidValueError for a
    quota below 1 MiB, NotFoundError if `read_only` and there is no such directory.

    `namespace`: 16 bytes in every record read or written here; records of other namespaces share directory and quota.
    """

    def __init__(
        self,
        path: Path,
        quota_bytes: int,
        namespace: bytes,
        *,
        files: FileSystem | None = None,
        counters: Counters | None = None,
        read_only: bool = False,
    ) -> None:
        if quota_bytes < SMALLEST_QUOTA:
            raise InvalidValueError(f"cache quota: {quota_bytes} bytes; allowed: {SMALLEST_QUOTA} (1 MiB) and more")
        self.namespace, self.read_only = namespace, read_only
        self.counters = counters or Counters()
        self._lock = threading.Lock()
        self._changes: list[Change] = []
        self._dirty: set[int] = set()
        self._cut: set[int] = set()  # segments that may have been truncated, their own header included
        self._sequence = 0
        self._catalog = Catalog(quota_bytes)
        self._directory = CacheDirectory(
            path,
            files or DiskFiles(),
            self._catalog,
            self.counters,
            quarantine_bytes=quota_bytes // 200,
            read_only=read_only,
        )
        self._in_use = InUse(self._directory.close)
        self._index_is_behind = not self._directory.index_is_right
        if not read_only:
            try:
                self._catalog.room_bytes = quota_bytes - self._index_bytes()
                self._catalog.shrink()  # the quota may be smaller than on the last start
                self._note_evictions()
                self._delete_removed()
                self._append_changes()
            except BaseException:
                self._directory.close()
                raise

    # Looking up

    def __len__(self) -> int:
        with self._lock:
            return len(self._catalog)

    @property
    def used_bytes(self) -> int:
        """Bytes of segments and index."""
        with self._lock:
            return self._catalog.used_bytes + self._index_bytes()

    def is_in_place(self) -> bool:
        """False if the directory was removed, emptied or replaced since it was opened."""
        return self._directory.is_in_place()

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        records = [record_id(self.namespace, key) for key in keys]
        with self._lock:
            return [record in self._catalog for record in records]

    def use(self, keys: Sequence[bytes]) -> None:
        """Marks `keys`, a prefix page after page, as just used. Its first page becomes the most recently used: later
        pages are useless without it, so they must be evicted first."""
        records = [record_id(self.namespace, key) for key in keys]
        with self._lock:
            for record in reversed(records):
                if self._catalog.touch(record) and not self.read_only:
                    self._changes.append(Change(USE, 0, 0, record))
            if len(self._changes) > _MOST_CHANGES:  # the disk is not writable: the whole index is written later
                self._changes.clear()
                self._index_is_behind = True

    def slot_sizes(self) -> dict[int, int]:
        """Bytes of a record on disk -> number of records."""
        sizes: dict[int, int] = {}
        with self._lock:
            for segment in self._catalog.segments.values():
                size = segment.geometry.slot_bytes
                sizes[size] = sizes.get(size, 0) + segment.live
        return sizes

    def records(self) -> list[bytes]:
        """Ids of all records of all namespaces, least recently used first."""
        with self._lock:
            return [record for record, _ in self._catalog.oldest_first()]

    # Reading

    def read(self, pages: Sequence[Page]) -> list[bool]:
        """Fills the pieces of each page that is stored and valid. Other pages' pieces get arbitrary contents.

        Raises OSError if the disk refused a read and nothing could be read at all.
        """
        return self.check(pages, self.fetch(pages))

    def fetch(self, pages: Sequence[Page]) -> list[Fetched]:
        """The first half of `read`, with all of its disk access. A caller keeps the disk busy by fetching the next
        pages while another thread checks these."""
        fetched: list[Fetched] = []
        error: OSError | None = None
        with self._in_use.using() as is_open:
            found = self._pin(pages) if is_open else []
            try:
                for group in neighbours(found, _LARGEST_TRANSFER):
                    try:
                        number, slot = parts(group[0][1])
                        fetched += fetch_slots(self._directory.segments[number], self._geometry(number), slot, group)
                    except OSError as failure:
                        self.counters.add("read_errors")
                        error = failure
            finally:
                self._unpin([place for _, place in found])
        if error is not None and not fetched:
            self.counters.add("misses", len(pages))
            raise error
        return fetched

    def check(self, pages: Sequence[Page], fetched: Sequence[Fetched]) -> list[bool]:
        """The second half of `read`: which of `pages` are valid, given what `fetch` returned for them."""
        hits: set[bytes] = set()
        for one in fetched:
            fault = one.check(self.namespace)
            if fault is None:
                hits.add(one.page.key)
            else:
                self._refuse_fetched(one, fault)
        results = [page.key in hits for page in pages]
        self.counters.add("hits", sum(results))
        self.counters.add("misses", len(results) - sum(results))
        self.counters.add("bytes_read", sum(page.payload_bytes for page in pages if page.key in hits))
        return results

    def _pin(self, pages: Sequence[Page]) -> list[tuple[Page, int]]:
        """The stored pages with their locations, in the order of the locations."""
        found = []
        records = [record_id(self.namespace, page.key) for page in pages]
        with self._lock:
            for page, record in zip(pages, records, strict=True):
                place = self._catalog.find(record)
                if place is not None:
                    self._catalog.pin(place)
                    found.append((page, place))
        return sorted(found, key=lambda item: item[1])

    def _unpin(self, places: Sequence[int]) -> None:
        with self._lock:
            for place in places:
                self._catalog.unpin(place)

    def _refuse_fetched(self, fetched: Fetched, fault: Fault) -> None:
        """Refuses the record, unless its slot was given to another record after the read."""
        record = record_id(self.namespace, fetched.page.key)
        with self._in_use.using() as is_open:
            with self._lock:
                is_there = is_open and self._catalog.find(record) == fetched.place
                if is_there:
                    self._catalog.pin(fetched.place)
            if is_there:
                try:
                    self._refuse(record, fetched.place, fault)
                finally:
                    self._unpin([fetched.place])

    def _geometry(self, number: int) -> Geometry:
        return self._catalog.segments[number].geometry

    def _refuse(self, record: bytes, place: int, fault: Fault) -> None:
        """Counts the record, which is pinned, quarantines it and drops it from the catalog."""
        number, slot = parts(place)
        self.counters.add("corrupt")
        level = logging.DEBUG if self.read_only else logging.WARNING  # expected while a server is writing
        logger.log(level, "cache record %s, slot %d of %08d.seg: %s; not used", record.hex(), slot, number, fault.value)
        if not self.read_only:
            geometry, source = self._geometry(number), self._directory.segments[number]
            self._directory.quarantine.keep(f"{record.hex()}.bad", source, geometry.offset(slot), geometry.slot_bytes)
        with self._lock:
            if fault in (Fault.EMPTY, Fault.TORN) and not self.read_only:
                self._cut.add(number)
            if self._catalog.find(record) == place:
                self._catalog.drop(record)
                if not self.read_only:
                    self._changes.append(Change(DROP, 0, 0, record))

    def check_record(self, record: bytes) -> Fault | None:
        """Reads a record of any namespace and quarantines a damaged one. Also None if there is no such record."""
        with self._lock:
            place = self._catalog.find(record)
            if place is None:
                return None
            self._catalog.pin(place)
        try:
            number, slot = parts(place)
            data = empty_buffer(self._geometry(number).slot_bytes)
            count = self._directory.segments[number].read_into([data], self._geometry(number).offset(slot))
            data[count:] = bytes(len(data) - count)  # a truncated file ends within the slot
            fault = check_slot(data, record)
            if fault is not None:
                self._refuse(record, place, fault)
            return fault
        finally:
            self._unpin([place])

    # Writing: one thread

    def write(self, pages: Sequence[Page]) -> int:
        """Stores `pages`, in consecutive slots where there is room; returns how many of them are stored afterwards.

        The first of `pages` becomes the most recently used record (see `use`).
        """
        with self._in_use.using() as is_open:
            if not is_open or self.read_only:
                return 0
            todo, num_known = self._allocate(pages)
            try:
                self._delete_removed()
                for number in self._catalog.segments.keys() - self._directory.segments.keys():
                    self._directory.create_segment(self._geometry(number))
                    self._dirty.add(number)
                self._mend_headers()
                for run in neighbours(todo, _LARGEST_TRANSFER):
                    self._write_run(run)
            except BaseException:
                with self._lock:
                    for _, place in todo:
                        self._catalog.give_up(place)
                raise
            self._enter(todo)
            self._append_changes()
            return num_known + len(todo)

    def _allocate(self, pages: Sequence[Page]) -> tuple[list[tuple[Page, int]], int]:
        """Pages with a slot for each, and the number of pages that were stored before."""
        todo: list[tuple[Page, int]] = []
        seen: set[bytes] = set()
        num_known = 0
        with self._lock:
            self._set_room()
            for page in pages:
                record = record_id(self.namespace, page.key)
                if record in self._catalog or record in seen:
                    num_known += 1
                    continue
                place = self._catalog.allocate(slot_bytes_for(page.payload_bytes))
                if place is None:
                    break  # later pages are useless without this one
                seen.add(record)
                todo.append((page, place))
            self._note_evictions()
        self.counters.add("dropped", len(pages) - num_known - len(todo))
        return todo, num_known

    def _mend_headers(self) -> None:
        """Rewrites lost headers: otherwise the next start quarantines the segment, its new records included."""
        with self._lock:
            cut = list(self._cut)
        for number in cut:
            if number in self._catalog.segments:
                self._directory.segments[number].write_from([self._geometry(number).encode()], 0)
            with self._lock:
                self._cut.discard(number)

    def _note_evictions(self) -> None:
        """Call with the lock held."""
        self.counters.add("evictions", len(self._catalog.evicted))
        self._changes.extend(Change(DROP, 0, 0, record) for record in self._catalog.evicted)
        self._catalog.evicted.clear()

    def _delete_removed(self) -> None:
        while self._catalog.removed:
            self._directory.delete_segment(self._catalog.removed[-1])
            self._dirty.discard(self._catalog.removed.pop())

    def _write_run(self, run: list[tuple[Page, int]]) -> None:
        number, slot = parts(run[0][1])
        self._sequence = max(self._sequence, time.time_ns())
        self._dirty.add(number)
        pages = [page for page, _ in run]
        file = self._directory.segments[number]
        write_slots(file, self._geometry(number), slot, pages, self.namespace, self._sequence)
        self._sequence += len(run)

    def _enter(self, written: list[tuple[Page, int]]) -> None:
        with self._lock:
            for page, place in reversed(written):
                record = record_id(self.namespace, page.key)
                self._catalog.put(record, place)
                self._changes.append(Change(PUT, *parts(place), record))
        self.counters.add("records_written", len(written))
        self.counters.add("bytes_written", sum(page.payload_bytes for page, _ in written))

    def _append_changes(self) -> None:
        index = self._directory.index
        assert index is not None
        with self._lock:
            changes, self._changes = self._changes, []
            is_behind, self._index_is_behind = self._index_is_behind, False
            largest = self._largest_index()
        try:
            if is_behind or index.size_bytes + len(changes) * ENTRY_BYTES > largest:
                with self._lock:
                    places = list(self._catalog.oldest_first())
                index.rewrite(Change(PUT, *parts(place), record) for record, place in places)
            elif changes:
                index.append(changes)
        except OSError:
            self._index_is_behind = True  # it lacks `changes`: the next write replaces the whole index
            raise

    def rewrite_index(self) -> None:
        """Rewrites the index without entries for slots that are gone."""
        self._index_is_behind = True
        self._append_changes()

    def sync(self) -> None:
        """Makes all earlier writes durable: they survive a power cut after this returns."""
        with self._in_use.using() as is_open:
            index = self._directory.index
            if not is_open or self.read_only or index is None:
                return
            for number in sorted(self._dirty & self._directory.segments.keys()):
                self._directory.segments[number].sync()
                self._dirty.discard(number)
            self._directory.sync_names()
            self._append_changes()
            index.sync()

    def probe(self, size: int) -> None:
        """Raises OSError if `size` bytes can't be written now. Removes what it writes."""
        self._directory.probe(size)

    def probe_reading(self) -> None:
        """Raises OSError if a segment can't be read now."""
        with self._in_use.using() as is_open:
            for number in list(self._directory.segments)[-1:] if is_open else []:
                self._directory.segments[number].read_into([bytearray(HEADER_BYTES)], 0)

    def clear(self) -> int:
        """Removes all records, of all namespaces; returns how many there were."""
        with self._in_use.using() as is_open:
            if not is_open:
                return 0
            with self._lock:
                num_records = len(self._catalog)
                for record, _ in list(self._catalog.oldest_first()):
                    self._catalog.drop(record)
                self._catalog.remove_empty()
                self._index_is_behind = True
            self._delete_removed()
            self._append_changes()
            return num_records

    # The quota covers segments, the index (during a rewrite, old and new side by side) and the quarantine.

    def _index_bytes(self) -> int:
        return self._directory.index.size_bytes if self._directory.index else 0

    def _largest_index(self) -> int:
        """Above this size the index is rewritten: twice what it needs, plus some for a nearly empty cache."""
        history = min(_HISTORY_BYTES, self._catalog.quota_bytes // 256)
        return 2 * len(self._catalog) * ENTRY_BYTES + history

    def _set_room(self) -> None:
        """Call with the lock held. Reserves the index's largest size, so that its growth evicts no segment."""
        index_bytes = self._largest_index() + len(self._catalog) * ENTRY_BYTES
        self._catalog.room_bytes = self._catalog.quota_bytes - index_bytes - self._catalog.quota_bytes // 200

    def abandon(self) -> None:
        """Closes once the last thread has left, and writes nothing more: the directory is gone or somebody else's."""
        self._in_use.abandon()

    def close(self) -> None:
        """Writes the LRU order, then closes. Raises OSError if the order could not be written."""
        try:
            self.sync()
        finally:
            self.abandon()
