"""One round: plain files and the disk tier write, read from the disk, and read again from the system's page cache.

The disk tier has no server here: its pages have the model's size, moved by the public methods that the server calls.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

from kt_runtime.bench.cache import system_cache
from kt_runtime.cache.disk_tier import DiskTier, DiskTierSettings
from kt_runtime.cache.format import Namespace
from kt_runtime.cache.page import Page
from kt_runtime.errors import RuntimeFault
from kt_runtime.files import fsync_directory

MEASURES = ("plain_write", "tier_write", "plain_read", "tier_read", "plain_read_warm", "tier_read_warm")
CALL_BYTES = 4 << 20  # per system call
CALL_PAGES = 128  # pages per write or read call of SGLang's HiCache
NAMESPACE = Namespace(weights="bench", kv_dtype="bench", page_tokens=1, layout="page_first_direct")
PATIENCE_S = 60.0  # a slow disk gives a low figure, not a failure


def _write_file(path: Path, source: memoryview) -> float:
    """Seconds to write a new file durably (fdatasync)."""
    path.unlink(missing_ok=True)
    started = time.perf_counter()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        offset = 0
        while offset < len(source):
            offset += os.pwrite(descriptor, source[offset : offset + CALL_BYTES], offset)
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)
    return time.perf_counter() - started


def _read_file(path: Path, target: memoryview) -> float:
    """Seconds to fill `target`, which has the file's size."""
    started = time.perf_counter()
    descriptor = os.open(path, os.O_RDONLY)
    try:
        offset = 0
        while offset < len(target):
            count = os.preadv(descriptor, [target[offset : offset + CALL_BYTES]], offset)
            if count == 0:
                raise EOFError(f"{path} ended after {offset} of {len(target)} bytes")
            offset += count
    finally:
        os.close(descriptor)
    return time.perf_counter() - started


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


@dataclass(frozen=True)
class Round:
    """`plain`: a file next to the tier's directory. Both sides write `source` to the disk and read it into `target`."""

    source: memoryview
    target: memoryview
    plain: Path
    tier: TierFiles
    is_tier_first: bool

    def measure(self) -> tuple[dict[str, float], float | None]:
        """(seconds by measure, share of the files in the page cache before the cold reads)."""
        try:
            seconds = self._both(
                "write", lambda: _write_file(self.plain, self.source), lambda: self.tier.write(self.source)
            )
            paths = [self.plain, *self.tier.paths()]
            system_cache.drop(*paths)
            cached_share = system_cache.cached_share(*paths)
            seconds |= self._both("read", self._read_plain, self._read_tier)
            system_cache.fill(*paths)  # the tier may have bypassed the page cache
            seconds |= self._both("read_warm", self._read_plain, self._read_tier)
        finally:
            self.plain.unlink(missing_ok=True)
            self.tier.clear()
            fsync_directory(self.plain.parent)  # keeps the cost of the removal out of the next round
        return seconds, cached_share

    def _both(self, what: str, plain: Callable[[], float], tier: Callable[[], float]) -> dict[str, float]:
        sides = {f"plain_{what}": plain, f"tier_{what}": tier}
        return {name: sides[name]() for name in sorted(sides, reverse=self.is_tier_first)}

    def _read_plain(self) -> float:
        return self._checked(lambda: _read_file(self.plain, self.target))

    def _read_tier(self) -> float:
        return self._checked(lambda: self.tier.read(self.target))

    def _checked(self, read: Callable[[], float]) -> float:
        """The seconds of `read`. Inverts `target` first, so that stale data can't pass. Raises RuntimeFault."""
        source, target = np.frombuffer(self.source, np.uint8), np.frombuffer(self.target, np.uint8)
        np.invert(source, out=target)
        seconds = read()
        if not np.array_equal(source, target):
            raise RuntimeFault("what was read is not what was written")
        return seconds
