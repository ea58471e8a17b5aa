"""The parameters of `bench scale`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kt_runtime.bench.options import PRESET, check_dtype, check_number
from kt_runtime.bench.swap.plan import LARGE_BYTES, bytes_of
from kt_runtime.errors import InvalidValueError

BAR_MS = 1000.0
"""Most time from the publication of 10 MB to the last replica's first token."""
RANKS_BAR = 0.8
"""Least speed of decoding on ranks of one core each, over that of one process with as many cores."""
LOADED_MEMORY_BAR, TRAINING_MEMORY_BAR = 1.1, 1.15
"""Most memory of a rank, over its share of the model."""
MOST_REPLICAS = 64
MOST_RANKS = 64


@dataclass(frozen=True)
class Plan:
    """`replicas`: servers of one registry; 0: none. `size`: of each adapter. `rounds`: publications that count.
    `streams`: of each replica.

    `ranks`: of one core each, whose decoding is compared with one process on as many cores; 0: none. `rank_model`,
    `rank_streams`, `rank_runs`: theirs; a case for each number of streams."""

    model: str = "tiny-qwen3-moe"
    layers: int | None = None
    replicas: int = 3
    size: str = "10MB"
    rounds: int = 5
    streams: int = 0
    dtype: str | None = None
    ranks: int = 0
    rank_model: str = PRESET
    rank_streams: tuple[int, ...] = (1, 8)
    rank_runs: int = 3

    def __post_init__(self) -> None:
        """Raises InvalidValueError and UnknownNameError."""
        if self.replicas != 0:
            check_number("replicas", self.replicas, 2, MOST_REPLICAS)
        if self.ranks != 0:
            check_number("ranks", self.ranks, 2, MOST_RANKS)
        if self.replicas == self.ranks == 0:
            raise InvalidValueError("--replicas and --ranks are 0: there is nothing to measure")
        for streams in self.rank_streams:
            check_number("rank_streams", streams)
        check_number("rank_runs", self.rank_runs)
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
