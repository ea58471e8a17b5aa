"""The parameters of `bench swap`: which adapters, how often, and with how many streams."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kt_runtime.bench.options import PRESET, check_dtype, check_number
from kt_runtime.errors import InvalidValueError
from kt_runtime.families import EXPERTS, family_for

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
_SIZE = re.compile(r"([0-9]{1,6})(KB|MB|GB)")
SIZES = ("10MB", "300MB", "3GB")
QUICK_SIZES = SIZES[:2]
TARGETS = ("attention", "all")
RANKS = (8, 64)
CYCLES, QUICK_CYCLES = 1000, 100
MOST_CONTROL_SECONDS = 3600.0
BYTES = 2
"""Bytes of a number in an adapter's file: bfloat16."""
LARGE_BYTES = 10**9
"""An adapter of so many bytes is loaded by a server that trains none of its rank: training takes eight times as much
memory."""
HIGHEST_ATTENTION_RANK = 256
"""A size that attention alone reaches with a higher rank is reached with all targets instead."""


@dataclass(frozen=True)
class Size:
    """An adapter of about `num_bytes` in bfloat16. `name`: as the user gave it."""

    name: str
    num_bytes: int
    rank: int
    targets: str


@dataclass(frozen=True)
class Plan:
    """`sizes`: of adapters that are loaded from files. `ranks`: of sessions that publish, on each of `TARGETS`.

    `rounds`: of each size and of each session. `cycles`: publications that are unloaded again.
    `streams`: that decode meanwhile; `many_streams`: during `swaps` of the name that they use. `control_seconds`: in
    which requests come and nothing is published.
    """

    model: str = PRESET
    layers: int | None = None
    sizes: tuple[str, ...] = SIZES
    ranks: tuple[int, ...] = RANKS
    rounds: int = 3
    cycles: int = CYCLES
    streams: int = 8
    many_streams: int = 64
    swaps: int = 10
    control_seconds: float = 30.0
    dtype: str | None = None

    def __post_init__(self) -> None:
        """Raises InvalidValueError and UnknownNameError."""
        for name in ("rounds", "streams", "many_streams", "swaps"):
            check_number(name, getattr(self, name))
        check_number("cycles", self.cycles, 0)
        if not 0 < self.control_seconds <= MOST_CONTROL_SECONDS:
            raise InvalidValueError(
                f"--control-seconds is {self.control_seconds}: must be above 0, at most {MOST_CONTROL_SECONDS:.0f}"
            )
        for rank in self.ranks:
            check_number("rank", rank)
        if self.layers is not None:
            check_number("layers", self.layers)
        for size in self.sizes:
            bytes_of(size)
        check_dtype(self.dtype)

    def facts(self) -> dict[str, Any]:
        names = ("model", "layers", "rounds", "cycles", "streams", "many_streams", "swaps", "control_seconds")
        return {name: getattr(self, name) for name in names}


def bytes_of(size: str) -> int:
    """Decimal units: 10MB are ten million bytes. Raises InvalidValueError."""
    match = _SIZE.fullmatch(size)
    if match is None or int(match[1]) < 1:
        raise InvalidValueError(f"--size {size!r}: must be a number above 0 with a unit of {', '.join(UNITS)}, as 10MB")
    return int(match[1]) * UNITS[match[2]]


def size_of(name: str, config: Mapping[str, Any]) -> Size:
    """The rank and targets that come nearest to the size."""
    num_bytes = bytes_of(name)
    for targets in TARGETS:
        rank = max(1, round(num_bytes / rank_bytes(config, targets)))
        if targets == TARGETS[-1] or rank <= HIGHEST_ATTENTION_RANK:
            break
    return Size(name, rank * rank_bytes(config, targets), rank, targets)


def smallest(plan: Plan, config: Mapping[str, Any]) -> Size:
    """The smallest size below `LARGE_BYTES`; without one, a session's highest rank on attention."""
    small = [size_of(name, config) for name in plan.sizes if bytes_of(name) < LARGE_BYTES]
    rank = max(plan.ranks)
    made = Size(f"rank {rank}", rank * rank_bytes(config, TARGETS[0]), rank, TARGETS[0])
    return min(small, key=lambda each: each.num_bytes, default=made)


def rank_bytes(config: Mapping[str, Any], targets: str) -> int:
    """Bytes of an adapter of rank 1."""
    modules = family_for(config).lora_modules(config)
    adapted = [each for each in modules if targets == "all" or is_attention(each.name)]
    return BYTES * sum(
        (each.in_features + each.out_features) * (each.num_experts if each.group == EXPERTS else 1) for each in adapted
    )


def is_attention(module: str) -> bool:
    return ".self_attn." in module
