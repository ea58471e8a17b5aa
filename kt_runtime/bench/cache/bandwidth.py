"""Bandwidth of the disk tier and of plain sequential files, measured alternately on the same disk."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from kt_runtime.bench.cache.round import MEASURES, Round, TierFiles
from kt_runtime.cache.format import slot_bytes_for


@dataclass
class Bandwidth:
    """`seconds`: by measure, one entry per round. `cached_shares`: the share of the files in the page cache before the
    cold reads, 0 to 1; None if the system does not report it."""

    page_bytes: int
    num_pages: int
    seconds: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in MEASURES})
    cached_shares: list[float | None] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return self.page_bytes * self.num_pages

    def as_json(self) -> dict[str, Any]:
        rates = {name: [self.num_bytes / each for each in self.seconds[name]] for name in MEASURES}
        return {
            "page_bytes": self.page_bytes,
            "record_bytes": slot_bytes_for(self.page_bytes),
            "pages": self.num_pages,
            "bytes": self.num_bytes,
            "cached_shares": self.cached_shares,
            "bytes_per_s": {name: self.num_bytes / median(self.seconds[name]) for name in MEASURES},
            "best_bytes_per_s": {name: max(rates[name]) for name in MEASURES},
            "rounds_bytes_per_s": rates,
        }

    def ratio(self, use: str) -> float:
        """The tier's median rate divided by the plain file's."""
        return median(self.seconds[f"plain_{use}"]) / median(self.seconds[f"tier_{use}"])

    def best_ratio(self, use: str) -> float:
        return min(self.seconds[f"plain_{use}"]) / min(self.seconds[f"tier_{use}"])


def measure(page_bytes: int, size: int, rounds: int, directory: Path, say: Callable[[str], None]) -> Bandwidth:
    """Runs one warm-up round, which touches all memory, then `rounds` counted ones. Raises RuntimeFault if the data
    read differs from the data written."""
    result = Bandwidth(page_bytes, max(8, size // page_bytes))
    source, target = _memory(result.num_bytes), _memory(result.num_bytes)
    source[:] = np.random.default_rng(0).bytes(result.num_bytes)
    with TierFiles(directory / "tier", page_bytes, result.num_pages) as tier:
        for number in range(-1, rounds):
            one = Round(source, target, directory / "plain", tier, is_tier_first=number % 2 == 1)
            seconds, cached_share = one.measure()
            if number >= 0:
                result.cached_shares.append(cached_share)
                for name in MEASURES:
                    result.seconds[name].append(seconds[name])
                rates = (f"{name} {result.num_bytes / seconds[name] / 1e6:.0f}" for name in MEASURES)
                say(f"files, round {number + 1} of {rounds}, MB/s: {', '.join(rates)}")
    return result


def _memory(size: int) -> memoryview:
    """Page-aligned memory for both sides: on some processors reads into unaligned memory are slow."""
    return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
