"""The disk tier for a server: look up, read, write, count. While serving it never raises and never waits long.

A caller's pages are a prefix: each page is useless without those before it. So `read` and `write` stop at the first
page that fails. `chain` (the keys from the beginning of the text up to the caller's pages) keeps the beginning of a
prefix from being evicted before its end.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kt_runtime.cache.disk import Counters, DiskFiles, FileSystem, Health, Use
from kt_runtime.cache.format import Namespace, is_key
from kt_runtime.cache.page import Page
from kt_runtime.cache.page_store import SMALLEST_QUOTA, PageStore
from kt_runtime.cache.read_ahead import Check, ReadAhead
from kt_runtime.cache.write_behind import WriteBehind
from kt_runtime.errors import InvalidValueError, KtError

_LONGEST_RETRY_S = 60.0
_PROBE_BYTES = 1 << 20

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class DiskTierSettings:
    """`root`: what must be there for `directory` to be made again, if it is part of another directory. `page_bytes`:
    payload of every page. `patience_s`: the disk counts as hanging when a read takes longer, or a
    write takes five times as long (pending writes have memory of their own). `sync_interval_s`: a power cut loses at
    most the writes of that time. `interval_s`: how often the directory is checked, and the first delay before a failed
    disk is tried again (the delay doubles, up to a minute).
    """

    directory: Path
    quota_bytes: int
    page_bytes: int
    namespace: Namespace
    root: Path | None = None
    read_only: bool = False
    read_memory_bytes: int = 256 << 20
    write_memory_bytes: int = 256 << 20
    num_readers: int = 2
    patience_s: float = 2.0
    sync_interval_s: float = 5.0
    interval_s: float = 1.0

    def __post_init__(self) -> None:
        if self.quota_bytes < max(SMALLEST_QUOTA, 8 * self.page_bytes):
            raise InvalidValueError(
                f"cache quota: {self.quota_bytes} bytes; allowed: {max(SMALLEST_QUOTA, 8 * self.page_bytes)} and more "
                f"(1 MiB and 8 pages of {self.page_bytes} bytes)"
            )
        for name in ("page_bytes", "num_readers", "patience_s", "interval_s"):
            if getattr(self, name) <= 0:
                raise InvalidValueError(f"cache {name}: {getattr(self, name)}; allowed: more than 0")


class DiskTier:
    """Opens on construction. Raises ConflictError if another server writes to the directory and NotFoundError if
    `read_only` and there is none. An unusable disk is retried; its directory is created only on construction.
    """

    def __init__(self, settings: DiskTierSettings, files: FileSystem | None = None) -> None:
        self._settings = settings
        self._files = files or DiskFiles()
        self._namespace = settings.namespace.digest()
        self.counters = Counters()
        self.health = Health(str(settings.directory))
        self._store: PageStore | None = None
        self._device: int | None = None
        self._is_closing = False
        self._next_sync_s = 0.0
        self._next_try_s, self._retry_s, self._written_at_retry = 0.0, settings.interval_s, 0
        try:
            self._open()
        except OSError as error:
            self._lose_directory(error)
        self._reader = ReadAhead(
            self._fetch_from_store,
            settings.page_bytes,
            memory_bytes=settings.read_memory_bytes,
            num_threads=settings.num_readers,
            patience_s=settings.patience_s,
            health=self.health,
            counters=self.counters,
        )
        self._writer = WriteBehind(
            self._write_store,
            self._keep,
            memory_bytes=max(settings.write_memory_bytes, settings.page_bytes),
            interval_s=settings.interval_s,
            patience_s=settings.patience_s,
            health=self.health,
            counters=self.counters,
        )

    # Called by the server

    def look_up(self, keys: Sequence[bytes], chain: Sequence[bytes] = ()) -> int:
        """The number of leading pages that are stored. Starts to prefetch them; does no disk access itself.

        `chain`: the keys before `keys`, from the beginning of the text.
        """
        store = self._store
        if store is None or not self.health[Use.READING]:
            found = 0
        else:
            known = store.contains(keys)
            found = next(
                (at for at, there in enumerate(known) if not there and keys[at] not in self._writer), len(keys)
            )
            store.use([*chain, *keys[:found]])
            num_begun = self._reader.start([key for key in keys[:found] if key not in self._writer])
            self.counters.add("read_ahead", num_begun)
        self.counters.add("misses", len(keys) - found)
        return found

    def read(self, pages: Sequence[Page], limit_s: float = math.inf) -> list[bool]:
        """Fills the pages' pieces, up to the first page that fails; the pieces of later pages stay as they are.

        Gives up a page whose read has not begun within `limit_s`.
        """
        results = [False] * len(pages)
        deadline = time.monotonic() + limit_s
        pages = self._usable(pages)
        position = 0
        while position < len(pages):
            if self._writer.fetch(pages[position]):
                self.counters.add("hits")
                self.counters.add("bytes_read", self._settings.page_bytes)
                results[position] = True
                position += 1
                continue
            end = next((at for at in range(position, len(pages)) if pages[at].key in self._writer), len(pages))
            end = max(end, position + 1)
            results[position:end] = self._reader.take(pages[position:end], deadline - time.monotonic())
            if not results[end - 1]:
                break
            position = end
        return results

    def write(self, pages: Sequence[Page], chain: Sequence[bytes] = ()) -> list[bool]:
        """Copies the pages that are not stored yet, to be written later. False: the page was dropped."""
        store = self._store
        if store is None or self._settings.read_only or not self.health[Use.WRITING]:
            self.counters.add("dropped", len(pages))
            return [False] * len(pages)
        usable = self._usable(pages)
        self.counters.add("dropped", len(pages) - len(usable))
        keys = [page.key for page in usable]
        known = store.contains(keys)
        missing = [page for page, there in zip(usable, known, strict=True) if not there]
        accepted = self._writer.offer(missing, [*chain, *keys])
        dropped = {page.key for page in missing[accepted:]}
        results = [page.key not in dropped for page in usable]
        return results + [False] * (len(pages) - len(usable))

    def _usable(self, pages: Sequence[Page]) -> Sequence[Page]:
        """The pages before the first one with an invalid key or size."""
        size = self._settings.page_bytes
        for position, page in enumerate(pages):
            if page.payload_bytes != size or not is_key(page.key):
                logger.error(
                    "cache: page %r of %d bytes is not stored: %d expected", page.key, page.payload_bytes, size
                )
                return pages[:position]
        return pages

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Waits until all accepted pages are written (or dropped because the disk failed). False after `timeout_s`."""
        return self._writer.flush(timeout_s)

    def sync(self, timeout_s: float = 10.0) -> bool:
        """Waits until accepted pages survive a power cut. False after `timeout_s`, or if the disk fails."""

        def sync_store() -> None:
            if (store := self._store_in_place()) is not None:
                store.sync()

        return self._writer.run(sync_store, timeout_s) and self.health[Use.WRITING]

    def clear(self, timeout_s: float = 10.0) -> bool:
        """Removes all records, of all namespaces. False after `timeout_s`, or if the disk fails."""

        is_cleared = False

        def clear_store() -> None:
            nonlocal is_cleared
            if (store := self._store_in_place()) is not None:
                self.counters.add("cleared", store.clear())
                is_cleared = True

        if self._settings.read_only:
            return False
        self._writer.drop_all()  # pending pages would be removed right after being written
        return self._writer.run(clear_store, timeout_s) and is_cleared

    def status(self) -> dict[str, int | str | None]:
        """Counters, records, bytes on disk, and why reading and writing are stopped (None while they work)."""
        store = self._store
        return {
            **self.counters.snapshot(),
            "records": len(store) if store else 0,
            "disk_bytes": store.used_bytes if store else 0,
            "quota_bytes": self._settings.quota_bytes,
            "reading_stopped": self.health.reason(Use.READING),
            "writing_stopped": self.health.reason(Use.WRITING),
        }

    def close(self, timeout_s: float = 10.0) -> None:
        """Writes pending pages. After `timeout_s` the threads of a hanging disk are left behind."""
        deadline = time.monotonic() + timeout_s
        self._is_closing = True
        is_written = self._writer.close(timeout_s)
        is_read = self._reader.close(max(0.0, deadline - time.monotonic()))
        store, self._store = self._store, None
        if store is not None and is_written and is_read:
            with contextlib.suppress(OSError):
                store.close()
        elif store is not None:
            store.abandon()

    # Called by the reading threads and by the writing thread

    def _fetch_from_store(self, pages: Sequence[Page]) -> Check:
        store = self._store
        if store is None:
            return lambda: [False] * len(pages)
        fetched = store.fetch(pages)
        return lambda: store.check(pages, fetched)

    def _write_store(self, pages: Sequence[Page], chain: Sequence[bytes]) -> None:
        store = self._store
        if store is None or not self._is_in_place(store):
            return
        if pages:
            store.write(pages)
        store.use(chain)

    def _store_in_place(self) -> PageStore | None:
        """Raises OSError if the directory is gone or replaced: a replacement's files may not be changed."""
        store = self._store
        if store is not None and not self._is_in_place(store):
            raise FileNotFoundError(f"{self._settings.directory} was removed or replaced")
        return store

    def _is_in_place(self, store: PageStore) -> bool:
        if store.is_in_place():
            return True
        self._lose_directory("the directory was removed or replaced")
        return False

    def _lose_directory(self, reason: object) -> None:
        store, self._store = self._store, None
        self.health.lose(reason, Use.READING, Use.WRITING)
        if store is not None:
            store.abandon()
        self._next_try_s = time.monotonic() + self._settings.interval_s

    def _keep(self) -> None:
        """Maintenance, called by the writing thread about every `interval_s`."""
        if self._is_closing:
            return
        store = self._store
        try:
            if store is None:
                self._try_again(self._reopen)
            elif self._is_in_place(store):
                if self._reader.was_refused():
                    self._try_again(self._probe_reading)
                if self.health[Use.WRITING]:
                    self._sync(store)
                else:
                    self._try_again(self._probe_writing)
        except OSError as error:
            self.counters.add("write_errors")
            self.health.lose(error, Use.WRITING)

    def _try_again(self, attempt: Callable[[], None]) -> None:
        """Calls `attempt` if its time has come; each failure doubles the delay until the next."""
        if time.monotonic() < self._next_try_s:
            return
        self._retry_s = min(2 * self._retry_s, _LONGEST_RETRY_S)  # reset once something was written
        self._next_try_s = time.monotonic() + self._retry_s
        try:
            attempt()
        except (OSError, KtError) as error:
            logger.debug("cache: %s is still not usable: %s", self._settings.directory, error)
        else:
            self._written_at_retry = self.counters["records_written"]

    def _reopen(self) -> None:
        """Only a directory on the same disk as before, or with a cache in it: an empty mount point is not ours."""
        directory, root = self._settings.directory, self._settings.root or self._settings.directory
        is_elsewhere = self._device is not None and self._files.identity(root)[0] != self._device
        if is_elsewhere and "segments" not in self._files.names(directory):
            raise OSError(f"{directory} is on another disk than before, and empty")
        self._open()
        self._reader.forget_failures()
        self.health.regain(Use.READING, Use.WRITING)

    def _open(self) -> None:
        settings = self._settings
        self._store = PageStore(
            settings.directory,
            settings.quota_bytes,
            self._namespace,
            files=self._files,
            counters=self.counters,
            read_only=settings.read_only,
        )
        self._device = self._files.identity(settings.directory)[0]
        self._next_sync_s = time.monotonic() + settings.sync_interval_s

    def _probe_reading(self) -> None:
        if self._store is not None:
            self._store.probe_reading()
            self._reader.forget_failures()
            self.health.regain(Use.READING)

    def _probe_writing(self) -> None:
        if self._store is not None:
            self._store.probe(max(self._settings.page_bytes, min(_PROBE_BYTES, self._settings.quota_bytes // 128)))
            self.health.regain(Use.WRITING)

    def _sync(self, store: PageStore) -> None:
        if time.monotonic() >= self._next_sync_s:
            store.sync()
            if self.counters["records_written"] > self._written_at_retry:
                self._retry_s = self._settings.interval_s
            self._next_sync_s = time.monotonic() + self._settings.sync_interval_s
