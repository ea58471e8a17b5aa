"""One round: both sides write, read from the disk, and read again from the system's page cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kt_runtime.bench.cache import plain_file, system_cache
from kt_runtime.bench.cache.tier_files import TierFiles
from kt_runtime.errors import RuntimeFault
from kt_runtime.files import fsync_directory

MEASURES = ("plain_write", "tier_write", "plain_read", "tier_read", "plain_read_warm", "tier_read_warm")


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
                "write", lambda: plain_file.write(self.plain, self.source), lambda: self.tier.write(self.source)
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
        return self._checked(lambda: plain_file.read(self.plain, self.target))

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
