"""The disk tier without a server: pages of the model's size, moved by the public methods that the server calls."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from kt_runtime.cache.disk_tier import DiskTier, DiskTierSettings
from kt_runtime.cache.format import Namespace
from kt_runtime.cache.page import Page
from kt_runtime.errors import RuntimeFault

CALL_PAGES = 128  # pages per write or read call of SGLang's HiCache
NAMESPACE = Namespace(weights="bench", kv_dtype="bench", page_tokens=1, layout="page_first_direct")
PATIENCE_S = 60.0  # a slow disk gives a low figure, not a failure


class TierFiles:
    """One tier for all rounds, as in a long-running server, so that its memory is touched before the counted rounds."""

    def __init__(self, directory: Path, page_bytes: int, num_pages: int) -> None:
        self.directory, self._page_bytes, self._num_pages = directory, page_bytes, num_pages
        self._tier = DiskTier(
            DiskTierSettings(
                directory=directory,
                quota_bytes=16 << 30,
                page_bytes=page_bytes,
                namespace=NAMESPACE,
                patience_s=PATIENCE_S,
            )
        )

    def __enter__(self) -> TierFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._tier.close(PATIENCE_S)

    def write(self, source: memoryview) -> float:
        """Seconds until all pages are durable on the disk. The tier must be empty."""
        before, pages = self._tier.counters["records_written"], self._pages(source)
        started = time.perf_counter()
        for first in range(0, self._num_pages, CALL_PAGES):
            self._check(self._tier.write(pages[first : first + CALL_PAGES]), "taken")
        is_safe = self._tier.sync(PATIENCE_S)
        seconds = time.perf_counter() - started
        if not is_safe or self._tier.counters["records_written"] - before != self._num_pages:
            raise RuntimeFault(f"the disk tier has not written all of {self._num_pages} pages: {self._tier.status()}")
        return seconds

    def read(self, target: memoryview) -> float:
        """Seconds from the look-up until the last page is read."""
        pages = self._pages(target)
        started = time.perf_counter()
        found = self._tier.look_up([page.key for page in pages])
        for first in range(0, found, CALL_PAGES):
            self._check(self._tier.read(pages[first : first + CALL_PAGES]), "read")
        seconds = time.perf_counter() - started
        if found != self._num_pages:
            raise RuntimeFault(f"the disk tier found {found} of {self._num_pages} pages that it had written")
        return seconds

    def clear(self) -> None:
        if not self._tier.clear(PATIENCE_S):
            raise RuntimeFault(f"the disk tier could not be cleared: {self._tier.status()}")

    def paths(self) -> list[Path]:
        return [path for path in self.directory.rglob("*") if path.is_file()]

    def _pages(self, memory: memoryview) -> list[Page]:
        """The pages in `memory`; K and V of a page are separate pieces, as in the server's host pool."""
        size, half = self._page_bytes, self._page_bytes // 2
        starts = range(0, self._num_pages * size, size)
        return [
            Page(b"page-%d" % start, [memory[start : start + half], memory[start + half : start + size]])
            for start in starts
        ]

    def _check(self, results: Sequence[bool], what: str) -> None:
        if not all(results):
            raise RuntimeFault(f"the disk tier has not {what} a page: {self._tier.status()}")
