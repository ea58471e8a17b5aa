"""The times to first token and per output token that the engine has measured lately, and training's share of time."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator, Sequence

KEPT = 1024
"""Number of latest requests whose times count."""
WINDOW_SECONDS = 30.0
"""Training's share of time is measured over about so many seconds."""


class Latest:
    """The latest `most` numbers, in no order. Their memory is allocated at the start, so that a server's memory does
    not grow with its first requests."""

    def __init__(self, most: int) -> None:
        self._values, self._count = array("d", bytes(8 * most)), 0

    def append(self, value: float) -> None:
        self._values[self._count % len(self._values)] = value
        self._count += 1

    def __len__(self) -> int:
        return min(self._count, len(self._values))

    def __iter__(self) -> Iterator[float]:
        return iter(self._values[: len(self)])


def quantile(values: Sequence[float] | Latest, share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed (nearest rank); 0 without values."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(share * 1e6) * len(ordered) // 10**6) - 1)] if ordered else 0.0


class Latencies:
    """Seconds from a request's arrival at the engine to its first token (TTFT), and between its later tokens on average
    (TPOT). Of finished requests only."""

    def __init__(self) -> None:
        self.first_token, self.per_token = Latest(KEPT), Latest(KEPT)

    def add(self, arrived: float, first: float, last: float, num_tokens: int) -> None:
        """Adds a finished request; times are of one clock. Ignores a request without a token or a known arrival (0)."""
        if num_tokens >= 1 and 0 < arrived <= first <= last:
            self.first_token.append(first - arrived)
            if num_tokens >= 2:
                self.per_token.append((last - first) / (num_tokens - 1))


class ShareOfTime:
    """Share of the latest seconds that training's slices took."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since, self._seconds = clock(), 0.0
        self.total_seconds = 0.0
        self._last = 0.0

    def add(self, seconds: float) -> None:
        self._roll()
        self._seconds += seconds
        self.total_seconds += seconds

    def __call__(self) -> float:
        self._roll()
        length = self._clock() - self._since
        weight = min(1.0, length / WINDOW_SECONDS)
        current = self._seconds / length if length > 0 else 0.0
        return min(1.0, weight * current + (1 - weight) * self._last if self._last else current)

    def _roll(self) -> None:
        length = self._clock() - self._since
        if length >= WINDOW_SECONDS:
            self._last, self._seconds, self._since = self._seconds / length, 0.0, self._clock()
