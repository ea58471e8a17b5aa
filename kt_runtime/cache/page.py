"""A page as a caller hands it to the store: a key, and the memory that its bytes are read into or written from."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Page:
    """`pieces`: the payload in order, each piece contiguous: the target of a read or the source of a write.

    `slot`: if given, memory of a whole slot that contains the one piece at its offset (`slot_io.page_in_slot`).
    """

    key: bytes
    pieces: Sequence[bytearray | memoryview]
    slot: memoryview | None = None

    @property
    def payload_bytes(self) -> int:
        return sum(len(piece) for piece in self.pieces)

    def fill(self, payload: memoryview) -> None:
        """Copies `payload` into the pieces."""
        offset = 0
        for piece in self.pieces:
            _copy(piece, payload[offset : offset + len(piece)])
            offset += len(piece)

    def copy_to(self, payload: memoryview) -> None:
        offset = 0
        for piece in self.pieces:
            _copy(payload[offset : offset + len(piece)], piece)
            offset += len(piece)


def _copy(target: bytearray | memoryview, source: bytearray | memoryview) -> None:
    """NumPy releases the GIL while copying; a memoryview assignment does not. The disk's threads run meanwhile."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def neighbours(placed: list[tuple[Page, int]], largest_bytes: int) -> Iterator[list[tuple[Page, int]]]:
    """Runs of `placed` (pages with their locations) with consecutive slots and payloads of one size, in order. A run
    ends once it has `largest_bytes`."""
    by_slot = itertools.groupby(enumerate(placed), key=lambda item: (item[1][1] - item[0], item[1][0].payload_bytes))
    for (_, size), run in by_slot:
        part = [item for _, item in run]
        step = max(1, largest_bytes // max(1, size))
        for start in range(0, len(part), step):
            yield part[start : start + step]
