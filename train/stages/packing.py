"""Packing: bins of several examples, so that micro-batches have similar numbers of tokens.

Examples in a bin remain separate sequences on the wire: they never attend to each other, whatever kind of packing the
recipe names. This is LLaMA-Factory's `neat_packing`.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of indices whose lengths add up to at most `capacity`, every index in exactly one bin.

    Best fit decreasing (Johnson 1973: at most 11/9 of the fewest possible bins, plus one). An example longer than
    `capacity` has its own bin. Bins are ordered by their first example, and examples within a bin by index.
    """
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, bin), ascending
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
