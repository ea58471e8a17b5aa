"""A page as the store is asked for it: a key, and where its bytes are or go."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Page:
    """`pieces`: the payload in order; where to read it to, or what to write. Contiguous memory each.

    `slot`: memory of a whole slot in which the one piece lies at its place (`slot_io.page_in_slot`), if there is such.
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
    """Unlike an assignment to a memoryview, NumPy lets other threads run meanwhile: those that have the disk work."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def neighbours(placed: list[tuple[Page, int]], largest_bytes: int) -> Iterator[list[tuple[Page, int]]]:
    """Parts of `placed` (pages with their locations) whose slots follow each other and whose payload is the same size,
    in order; a part ends once it has `largest_bytes`."""
    by_slot = itertools.groupby(enumerate(placed), key=lambda item: (item[1][1] - item[0], item[1][0].payload_bytes))
    for (_, size), run in by_slot:
        part = [item for _, item in run]
        step = max(1, largest_bytes // max(1, size))
        for start in range(0, len(part), step):
            yield part[start : start + step]
