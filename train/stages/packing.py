"""Packing: several examples in one bin, so that a micro-batch holds much the same number of tokens each time.

Examples in a bin stay sequences of their own on the wire: they never see each other, whatever the recipe calls packing
(LLaMA-Factory's `neat_packing`).
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of indices whose lengths add up to at most `capacity`, every index in exactly one bin.

    Best fit decreasing (Johnson 1973: at most 11/9 of the fewest possible bins, and one). An example longer than
    `capacity` has a bin to itself. The bins come in the order of their first example, as do examples within a bin.
    """
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (what is left, bin), ascending
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        place = bisect.bisect_left(room, (lengths[index], -1))
        if place < len(room):
            left, target = room.pop(place)
        else:
            left, target = capacity, len(bins)
            bins.append([])
        bins[target].append(index)
        bisect.insort(room, (left - lengths[index], target))
    return sorted(sorted(each) for each in bins)
