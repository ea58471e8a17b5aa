"""The parameters of `bench scale`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kt_runtime.bench.options import check_dtype, check_number
from kt_runtime.bench.swap.plan import LARGE_BYTES, bytes_of
from kt_runtime.errors import InvalidValueError

BAR_MS = 1000.0
"""From the publication of 10 MB to the last replica's first token."""
MOST_REPLICAS = 64


@dataclass(frozen=True)
class Plan:
    """`replicas`: servers of one registry. `size`: of each adapter. `rounds`: publications that count. `streams`: of
    each replica."""

    model: str = "tiny-qwen3-moe"
    layers: int | None = None
    replicas: int = 3
    size: str = "10MB"
    rounds: int = 5
    streams: int = 0
    dtype: str | None = None

    def __post_init__(self) -> None:
        """Raises InvalidValueError and UnknownNameError."""
        check_number("replicas", self.replicas, 2, MOST_REPLICAS)
        check_number("rounds", self.rounds)
        check_number("streams", self.streams, 0)
        if self.layers is not None:
            check_number("layers", self.layers)
        if bytes_of(self.size) >= LARGE_BYTES:
            raise InvalidValueError(f"--size {self.size}: must be below 1GB")
        check_dtype(self.dtype)

    def facts(self) -> dict[str, Any]:
        names = ("model", "layers", "replicas", "size", "rounds", "streams")
        return {name: getattr(self, name) for name in names}
