"""Counts the rows that became examples, were truncated or left out, and names the first of each kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

NUM_NAMED = 5
NOTHING_TRAINED = "have no trained token"
EQUAL = "have the same chosen and rejected answer"
TOO_LONG = "have a prompt that does not fit"


@dataclass(slots=True)
class Tally:
    num_rows: int = 0
    too_long: list[tuple[str, int]] = field(default_factory=list)
    lost: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)

    def cut(self, where: str, num_tokens: int) -> None:
        """`where` is no key: all rows of a JSON file may lie on one line."""
        self.too_long.append((where, num_tokens))

    def lose(self, reason: str, where: str) -> None:
        self.lost[reason] = self.lost.get(reason, 0) + 1
        self.first.setdefault(reason, where)

    def report(self, cutoff_len: int, say: Callable[[str], None]) -> None:
        if self.too_long:
            named = [f"{where} by {tokens - cutoff_len:,}" for where, tokens in self.too_long[:NUM_NAMED]]
            more = len(self.too_long) - len(named)
            say(
                f"{len(self.too_long):,} of {self.num_rows:,} rows are longer than cutoff_len={cutoff_len} tokens, and "
                f"cut there: {', '.join(named)}{f' and {more:,} more' if more else ''}; the longest has "
                f"{max(tokens for _, tokens in self.too_long):,} tokens"
            )
        for reason, count in self.lost.items():
            say(
                f"{count} of {self.num_rows} rows {reason} within cutoff_len={cutoff_len}: left out "
                f"(the first: {self.first[reason]})"
            )
