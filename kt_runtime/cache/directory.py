"""The open files of one cache directory: lock, index, segments, quarantine.

DIRECTORY/lock            held by the one process that writes
DIRECTORY/index.log       see index_log
DIRECTORY/segments/*.seg  see segment
DIRECTORY/aside/          quarantine: a few damaged records, for inspection
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from kt_runtime.cache import loading
from kt_runtime.cache.catalog import Catalog
from kt_runtime.cache.counters import Counters
from kt_runtime.cache.filesystem import FileSystem, OpenFile
from kt_runtime.cache.index_log import IndexLog
from kt_runtime.cache.quarantine import Aside
from kt_runtime.cache.record import FORMAT_VERSION
from kt_runtime.cache.segment import Geometry, segment_name
from kt_runtime.errors import NotFoundError

logger = logging.getLogger(__name__)


class CacheDirectory:
    """Opens on construction and fills `catalog`. `segments`: file by number. `index` is None only for a reader of a
    directory without one. `index_is_right`: False if the catalog was built from the records instead.

    Raises ConflictError if another process writes to the directory, NotFoundError if `read_only` and there is no cache.
    """

    def __init__(
        self, path: Path, files: FileSystem, catalog: Catalog, counters: Counters, *, aside_bytes: int, read_only: bool
    ) -> None:
        self.path, self.read_only = path, read_only
        self._files, self._counters = files, counters
        self.segments: dict[int, OpenFile] = {}
        self.index: IndexLog | None = None
        self.index_is_right = True
        self._has_new_names = True
        self.aside = Aside(files, path / "aside", aside_bytes)
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
        self.aside.open()

    def _load(self, catalog: Catalog) -> None:
        write = not self.read_only
        self.segments, foreign = loading.open_segments(self._files, self.path / "segments", catalog, write=write)
        if write or "index.log" in self._names(self.path):
            self.index = IndexLog(self._files, self.path / "index.log", write=write)
        self.index_is_right = self.index is not None and loading.replay(self.index, catalog)
        if not self.index_is_right and catalog.segments:
            loading.scan(self.segments, catalog)
        catalog.finish_loading()
        if write:
            self._put_aside(foreign)

    def _names(self, path: Path) -> list[str]:
        try:
            return self._files.names(path)
        except FileNotFoundError:
            raise NotFoundError(f"{path} does not exist") from None

    def _put_aside(self, names: list[str]) -> None:
        for name in names:
            path = self.path / "segments" / name
            self._counters.add("corrupt")
            logger.warning("%s is no segment of format %d; put aside", path, FORMAT_VERSION)
            try:
                size = self._size(path)
                if size is None:
                    self._files.remove(path)  # a link has no content to inspect
                else:
                    self.aside.take_file(path, size)
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
