"""The parameters of one run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kt_runtime.bench.experts.formats import DEFAULT_FORMATS, BenchFormat, parse_format
from kt_runtime.bench.experts.shapes import BenchShape, parse_shape
from kt_runtime.bench.experts.timing import Patience
from kt_runtime.errors import InvalidValueError
from kt_runtime.experts.machine import default_threads, usable_processors
from kt_runtime.experts.native import resolve_isa

T = TypeVar("T")

FORWARD, TRAINING = "forward", "forward_backward"
DEFAULT_SHAPES = ("dsv2lite", "qwen3")
DEFAULT_TOKENS = (1, 4, 16, 64, 512)
MOST_TOKENS = 1 << 16


@dataclass(frozen=True)
class Plan:
    shapes: tuple[BenchShape, ...]
    formats: tuple[BenchFormat, ...]
    isas: tuple[str, ...]
    threads: tuple[int, ...]
    tokens: tuple[int, ...]
    ops: tuple[str, ...]  # empty: forward everywhere, forward_backward with the most tokens only
    peer: Path | None  # a Python interpreter with kt-kernel
    with_torch: bool
    patience: Patience

    def cases(self) -> list[tuple[int, str]]:
        """(tokens, op), forward before forward_backward."""
        if self.ops:
            return [(tokens, op) for tokens in self.tokens for op in (FORWARD, TRAINING) if op in self.ops]
        return [*((tokens, FORWARD) for tokens in self.tokens), (max(self.tokens), TRAINING)]


def make_plan(
    *,
    shapes: Sequence[str] = (),
    formats: Sequence[str] = (),
    isas: Sequence[str] = (),
    threads: Sequence[int] = (),
    tokens: Sequence[int] = (),
    ops: Sequence[str] = (),
    num_experts: int | None = None,
    peer: Path | None = None,
    with_torch: bool = True,
    patience: Patience,
) -> Plan:
    """A plan; an empty sequence means the default. Raises UnknownNameError, InvalidValueError."""
    processors = usable_processors()
    for count in threads:
        if not 1 <= count <= processors:
            raise InvalidValueError(f"--threads is {count}; this process may use 1 to {processors} processors")
    for count in tokens:
        if not 1 <= count <= MOST_TOKENS:
            raise InvalidValueError(f"--tokens is {count}; allowed: 1 to {MOST_TOKENS}")
    if patience.runs < 1 or not patience.seconds > 0:
        raise InvalidValueError(f"--runs is {patience.runs} and --seconds {patience.seconds}; both must be positive")
    made = [parse_shape(text) for text in shapes or DEFAULT_SHAPES]
    return Plan(
        tuple(_unique(made if num_experts is None else [_shrunk(shape, num_experts) for shape in made])),
        tuple(_unique(parse_format(name) for name in formats or DEFAULT_FORMATS)),
        tuple(_unique(resolve_isa(name) for name in isas)) or (resolve_isa(None),),
        tuple(_unique(threads or (1, default_threads()))),
        tuple(sorted(set(tokens or DEFAULT_TOKENS))),
        tuple(ops),
        peer,
        with_torch,
        patience,
    )


def _shrunk(shape: BenchShape, num_experts: int) -> BenchShape:
    if not shape.top_k <= num_experts <= shape.num_experts:
        raise InvalidValueError(
            f"--experts is {num_experts}; shape {shape.name} has {shape.num_experts}, a token takes {shape.top_k}"
        )
    return shape.with_experts(num_experts)


def _unique(items: Iterable[T]) -> list[T]:
    return list(dict.fromkeys(items))
