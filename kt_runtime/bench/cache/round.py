"""One round: both sides write, read from the disk, and read again what the system still has in memory."""

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
    """`plain`: the file beside the tier's directory. Both sides move `source` to the disk and back to `target`."""

    source: memoryview
    target: memoryview
    plain: Path
    tier: TierFiles
    is_tier_first: bool

    def measure(self) -> tuple[dict[str, float], float | None]:
        """Seconds by measure, and how much the system still had in its own cache before the reads that aren't warm."""
        try:
            seconds = self._both(
                "write", lambda: plain_file.write(self.plain, self.source), lambda: self.tier.write(self.source)
            )
            paths = [self.plain, *self.tier.paths()]
            system_cache.drop(*paths)
            cached_share = system_cache.cached_share(*paths)
            seconds |= self._both("read", self._read_plain, self._read_tier)
            system_cache.fill(*paths)  # the tier may have read past it
            seconds |= self._both("read_warm", self._read_plain, self._read_tier)
        finally:
            self.plain.unlink(missing_ok=True)
            self.tier.clear()
            fsync_directory(self.plain.parent)  # what removing costs the disk is not the next round's
        return seconds, cached_share

    def _both(self, what: str, plain: Callable[[], float], tier: Callable[[], float]) -> dict[str, float]:
        sides = {f"plain_{what}": plain, f"tier_{what}": tier}
        return {name: sides[name]() for name in sorted(sides, reverse=self.is_tier_first)}

    def _read_plain(self) -> float:
        return self._checked(lambda: plain_file.read(self.plain, self.target))

    def _read_tier(self) -> float:
        return self._checked(lambda: self.tier.read(self.target))

    def _checked(self, read: Callable[[], float]) -> float:
        """`read`'s seconds. Nothing of what it should bring was there before."""
        source, target = np.frombuffer(self.source, np.uint8), np.frombuffer(self.target, np.uint8)
        np.invert(source, out=target)
        seconds = read()
        if not np.array_equal(source, target):
            raise RuntimeFault("what was read is not what was written")
        return seconds
