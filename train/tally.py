"""What became of the rows of a dataset on their way to examples: counted, and the first of each kind named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

NOTHING_TRAINED = "have no trained token"
EQUAL = "have the same chosen and rejected answer"


@dataclass(slots=True)
class Tally:
    num_rows: int = 0
    num_cut: int = 0
    _last_cut: str = ""
    lost: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)

    def cut(self, where: str) -> None:
        """A pair's two answers count once."""
        self.num_cut += where != self._last_cut
        self._last_cut = where

    def lose(self, reason: str, where: str) -> None:
        self.lost[reason] = self.lost.get(reason, 0) + 1
        self.first.setdefault(reason, where)

    def report(self, cutoff_len: int, say: Callable[[str], None]) -> None:
        if self.num_cut:
            say(f"{self.num_cut} of {self.num_rows} rows are longer than cutoff_len={cutoff_len} tokens: cut there")
        for reason, count in self.lost.items():
            say(
                f"{count} of {self.num_rows} rows {reason} within cutoff_len={cutoff_len}: left out "
                f"(the first: {self.first[reason]})"
            )
