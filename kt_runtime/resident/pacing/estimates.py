"""How long a slice will take, learned from those that ran: seconds per unit of size, for each kind of slice."""

from __future__ import annotations

import math

FORGETTING = 4
"""With each slice, an estimate moves by 1/`FORGETTING` of the difference. An estimate that followed the slowest
slice would cut the next ones smaller than needed, long after a pause of the machine. A slice that is slower than
estimated only reduces the requests' slack, for which the budget compensates."""


class Estimates:
    """Sizes between two powers of two share an estimate. A slice of few tokens costs more per token, so the cost per
    token of smaller slices of a kind is an upper bound for larger ones."""

    def __init__(self) -> None:
        self._seconds_per_unit: dict[str, dict[int, float]] = {}

    def __call__(self, kind: str, size: int) -> float:
        """Expected seconds; infinite if no slice of the kind and of at most about this size has run.

        The estimate from smaller slices is rather too high; larger slices are not used. So a size that was slow once
        and no longer runs is tried again when smaller slices show that it fits.
        """
        known, size = self._seconds_per_unit.get(kind, {}), max(size, 1)
        return min((cost for bucket, cost in known.items() if bucket <= size.bit_length()), default=math.inf) * size

    def knows(self, kind: str, size: int) -> bool:
        """Whether a slice of about this size has run."""
        return max(size, 1).bit_length() in self._seconds_per_unit.get(kind, {})

    def learn(self, kind: str, size: int, seconds: float) -> None:
        size = max(size, 1)
        of_kind = self._seconds_per_unit.setdefault(kind, {})
        found = seconds / size
        known = of_kind.get(size.bit_length(), found)
        of_kind[size.bit_length()] = known + (found - known) / FORGETTING
