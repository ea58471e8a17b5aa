"""The order of rows from several datasets: one dataset after the other, or interleaved.

Interleaving matches `datasets.interleave_datasets` (same seed, same order): round-robin, or drawn with given
probabilities. "under" stops when the first dataset ends, "over" and "once" when all have ended; "over" restarts
datasets that have ended, "once" does not.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

import numpy as np

Item = TypeVar("Item")
Source = Callable[[], Iterator[Item]]

STRATEGIES = ("concat", "interleave_under", "interleave_over", "interleave_once")


def mix(
    sources: Sequence[Source[Item]], strategy: str, probabilities: Sequence[float] | None, seed: int
) -> Iterator[Item]:
    """Rows of all sources. Each source must yield at least one row, and the same rows at each call."""
    if strategy == "concat" or len(sources) == 1:
        return (item for source in sources for item in source())
    return _interleave([_Tape(source) for source in sources], strategy, probabilities, seed)


class _Tape(Generic[Item]):
    """Reads one row ahead, so that the end of a source is known when its last row is taken."""

    def __init__(self, source: Source[Item]) -> None:
        self._source, self.ended = source, False
        self._rewind()

    def _rewind(self) -> None:
        self._rows = self._source()
        self._next = next(self._rows)

    def take(self, again: bool) -> Item:
        """The next row; after the last one, the first one again if `again`."""
        item = self._next
        try:
            self._next = next(self._rows)
        except StopIteration:
            self.ended = True
            if again:
                self._rewind()
        return item


def _interleave(
    tapes: list[_Tape[Item]], strategy: str, probabilities: Sequence[float] | None, seed: int
) -> Iterator[Item]:
    enough = any if strategy == "interleave_under" else all
    for position, index in enumerate(_order(len(tapes), probabilities, seed)):
        whole_round = probabilities is not None or position % len(tapes) == 0
        if whole_round and enough(tape.ended for tape in tapes):
            return
        tape = tapes[index]
        if not (tape.ended and strategy == "interleave_once"):
            yield tape.take(again=strategy == "interleave_over")


def _order(num_sources: int, probabilities: Sequence[float] | None, seed: int) -> Iterator[int]:
    if probabilities is None:
        yield from itertools.cycle(range(num_sources))
    random = np.random.default_rng(seed)
    while True:
        yield from random.choice(num_sources, size=1000, p=probabilities).tolist()
