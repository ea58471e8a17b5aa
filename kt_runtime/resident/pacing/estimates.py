"""How long a slice will take, learned from those that ran: seconds per unit of size, for each kind of slice."""

from __future__ import annotations

import math

FORGETTING = 4
"""With each slice, a too high estimate falls by a quarter of the difference. A too low estimate rises immediately."""


class Estimates:
    """Sizes between two powers of two share an estimate: a slice of few tokens costs more per token."""

    def __init__(self) -> None:
        self._seconds_per_unit: dict[str, dict[int, float]] = {}

    def __call__(self, kind: str, size: int) -> float:
        """Expected seconds, rather too many than too few; infinite if no slice of the kind tells.

        Where none of about this size has run, the next smaller one tells: its cost per unit is higher. A larger one
        does not.
        """
        known, size = self._seconds_per_unit.get(kind, {}), max(size, 1)
        smaller = [bucket for bucket in known if bucket <= size.bit_length()]
        return known[max(smaller)] * size if smaller else math.inf

    def knows(self, kind: str, size: int) -> bool:
        """Whether a slice of about this size has run."""
        return max(size, 1).bit_length() in self._seconds_per_unit.get(kind, {})

    def learn(self, kind: str, size: int, seconds: float) -> None:
        size = max(size, 1)
        of_kind = self._seconds_per_unit.setdefault(kind, {})
        found, known = seconds / size, of_kind.get(size.bit_length(), 0.0)
        of_kind[size.bit_length()] = max(found, known + (found - known) / FORGETTING)
