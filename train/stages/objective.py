"""An objective turns a step's examples into calls of the resident, and the replies into a loss and metrics."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kt_runtime.errors import NumericsError
from kt_runtime.train.examples import Example, Pair, Prompt
from kt_runtime.train.resident import Resident
from kt_runtime.wire import Batch, ForwardResult, Ticket

Row = Example | Pair | Prompt

# Evaluation calls in flight: enough that the resident always has the next one, few enough for its memory.
CALLS_AHEAD = 4


@dataclass(frozen=True)
class Outcome:
    """Results of one optimizer step. `loss` and `metrics` are means over the counted items: trained tokens, or pairs.

    `num_tokens`: tokens computed by the layers; a prompt shared by a pair counts once. `num_samples`: rows.
    `facts`: values for the log that have no mean, such as a version.
    """

    loss: float
    num_tokens: int
    num_samples: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Totals:
    """Sums over an evaluation, and their divisors. `has_loss`: False in reinforcement learning, which has rewards."""

    loss: float = 0.0
    count: int = 0
    correct: int = 0
    trained_tokens: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    has_loss: bool = True

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
        """Computes constants for `rows`, listed in the order of their use, before any training or evaluation and after
        `restore`. Ends early when `stop` returns True."""

    def accumulate(self, micro_batches: Sequence[Sequence[Row]]) -> Outcome:
        """Adds the step's gradient to the session's. A step's micro-batches are one call, see `sft`."""

    def evaluate(self, rows: Sequence[Row], batch_size: int, stop: Callable[[], bool]) -> Totals | None:
        """Sums over `rows` with the session's current weights; None if `stop` returned True meanwhile."""

    def state(self) -> dict[str, Any]:
        """numpy arrays for a checkpoint, from which a resumed run computes the same losses."""

    def restore(self, arrays: Mapping[str, Any]) -> None: ...

    def close(self) -> None:
        """Frees what the objective holds on the server, at the end of a run and after an error."""


Call = tuple[Ticket, Batch, Sequence[Row]]


def in_flight(
    client: Resident, calls: Iterable[Call], stop: Callable[[], bool] = lambda: False
) -> Iterator[tuple[ForwardResult, Sequence[Row]]]:
    """Finishes `calls` in order, with up to `CALLS_AHEAD` later ones in flight; starts no more after `stop`."""
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
