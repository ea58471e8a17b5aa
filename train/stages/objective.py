"""What a stage trains for: turns a step's examples into calls of the resident, and answers into a loss and metrics."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kt_runtime.errors import NumericsError
from kt_runtime.train.examples import Example, Pair
from kt_runtime.train.resident import Resident
from kt_runtime.wire import Batch, ForwardResult, Ticket

Row = Example | Pair

# Evaluation's calls under way at once: the resident always has one to go on with, and few wait in its memory.
CALLS_AHEAD = 4


@dataclass(frozen=True)
class Outcome:
    """Of one optimizer step. `loss` and `metrics` are means over what counts: trained tokens, or pairs.

    `num_tokens`: tokens that went through the layers, a prompt shared by a pair once. `num_samples`: rows.
    """

    loss: float
    num_tokens: int
    num_samples: int
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Totals:
    """Of an evaluation: sums, and over how much they are to be divided."""

    loss: float = 0.0
    count: int = 0
    correct: int = 0
    trained_tokens: int = 0
    metrics: dict[str, float] = field(default_factory=dict)

    def add(self, result: ForwardResult, count: int, trained_tokens: int) -> None:
        self.loss += result.loss
        self.count += count
        self.correct += result.num_correct
        self.trained_tokens += trained_tokens
        for name, value in result.metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value


def check_finite(figures: Mapping[str, float]) -> None:
    """Raises NumericsError naming a figure that is NaN or infinite."""
    for name, value in figures.items():
        if not math.isfinite(value):
            raise NumericsError(f"{name} is {value}")


class Objective(Protocol):
    def prepare(self, rows: Iterable[Row], stop: Callable[[], bool]) -> None:
        """Before anything is trained or evaluated, and after `restore`: computes what is known beforehand about `rows`,
        which the run will come to in this order. Ends early when `stop` says so."""

    def accumulate(self, micro_batches: Sequence[Sequence[Row]]) -> Outcome:
        """Adds the step's gradient to the session's: a step's micro-batches are one call, see `sft`."""

    def evaluate(self, rows: Sequence[Row], batch_size: int, stop: Callable[[], bool]) -> Totals | None:
        """Sums over `rows`, with the session as it is; None when `stop` said so in between."""

    def state(self) -> dict[str, Any]:
        """numpy arrays that a resumed run needs to give the same losses, for a checkpoint."""

    def restore(self, arrays: Mapping[str, Any]) -> None: ...


Call = tuple[Ticket, Batch, Sequence[Row]]


def in_flight(
    client: Resident, calls: Iterable[Call], stop: Callable[[], bool] = lambda: False
) -> Iterator[tuple[ForwardResult, Sequence[Row]]]:
    """Finishes `calls` in order while up to `CALLS_AHEAD` later ones are under way; begins no more after `stop`."""
    waiting: deque[Call] = deque()
    for call in calls:
        waiting.append(call)
        if len(waiting) > CALLS_AHEAD:
            yield _finish(client, waiting.popleft())
        if stop():
            break
    while waiting:
        yield _finish(client, waiting.popleft())


def chunks(rows: Sequence[Row], size: int) -> Iterator[Sequence[Row]]:
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def _finish(client: Resident, call: Call) -> tuple[ForwardResult, Sequence[Row]]:
    ticket, batch, rows = call
    return client.finish_forward(ticket, batch), rows
