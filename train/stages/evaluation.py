"""Evaluation: metrics on held-out rows, and the best of a run's evaluations."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, TypeVar

from kt_runtime.errors import InvalidValueError, UnknownNameError
from kt_runtime.train.recipe import Recipe
from kt_runtime.train.stages.objective import Objective, Row, Totals, check_finite

Item = TypeVar("Item")


def split(
    rows: list[Item], val_size: float, seed: int, identities: Sequence[Hashable] | None = None
) -> tuple[list[Item], list[Item]]:
    """(Rows to train on, rows held out), both in the order of the data. `val_size`: a share below 1, or a count.

    `identities`: one for each row. A row that mixing or `num_samples` repeats counts once. All its repeats leave the
    training rows and one is held out: otherwise a row would be both evaluated and trained on. The choice depends on the
    seed and the number of distinct rows.
    """
    named = range(len(rows)) if identities is None else identities
    first = {name: index for index, name in reversed(list(enumerate(named)))}
    indices = sorted(first.values())
    count = ceil(len(indices) * val_size) if val_size < 1 else int(val_size)
    if count >= len(indices):
        raise InvalidValueError(
            f"val_size: {val_size:g}: would hold out {count} of {len(indices)} rows; at least one must be left to "
            "train on"
        )
    held_out = set(random.Random(f"{seed}:validation").sample(indices, count))
    train = [row for row, name in zip(rows, named, strict=True) if first[name] not in held_out]
    return train, [rows[index] for index in sorted(held_out)]


def identity_of(row: Row) -> Hashable:
    """Place and content: rows of a file may share a line, and rows at different places may have equal content."""
    digest = hashlib.blake2b(digest_size=16)
    for part in row.contents():
        digest.update(part)
    return row.where, digest.digest()


class Evaluator:
    """`sets`: name to rows; the name "" is the only set of a run that evaluates its datasets together."""

    def __init__(
        self,
        objective: Objective,
        sets: Mapping[str, Sequence[Row]],
        recipe: Recipe,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._objective, self._sets, self._recipe, self._clock = objective, sets, recipe, clock

    def run(self, stop: Callable[[], bool] = lambda: False) -> dict[str, float] | None:
        """`eval_loss` and the like, with several sets `eval_NAME_loss`; None if `stop` returned True.

        Raises NumericsError for NaN or infinity.
        """
        figures: dict[str, float] = {}
        for name, rows in self._sets.items():
            started = self._clock()
            totals = self._objective.evaluate(rows, self._recipe.per_device_eval_batch_size, stop)
            if totals is None:
                return None
            prefix = f"eval_{name}_" if name else "eval_"
            figures |= self._figures(prefix, totals, len(rows), self._clock() - started)
        check_finite(figures)
        return figures

    def _figures(self, prefix: str, totals: Totals, num_rows: int, seconds: float) -> dict[str, float]:
        seconds = max(seconds, 1e-9)
        batches = ceil(num_rows / self._recipe.per_device_eval_batch_size)
        figures = {f"{prefix}loss": totals.loss / totals.count} if totals.has_loss else {}
        if self._recipe.compute_accuracy:
            figures[f"{prefix}accuracy"] = totals.correct / totals.trained_tokens
        figures |= {f"{prefix}{name}": value / totals.count for name, value in totals.metrics.items()}
        figures[f"{prefix}runtime"] = round(seconds, 4)
        figures[f"{prefix}samples_per_second"] = round(num_rows / seconds, 3)
        figures[f"{prefix}steps_per_second"] = round(batches / seconds, 3)
        return figures


@dataclass
class Best:
    """The best evaluation so far, and the number of evaluations since."""

    key: str
    greater_is_better: bool
    patience: int | None
    metric: float | None = None
    step: int | None = None
    checkpoint: str | None = None
    since: int = 0

    @classmethod
    def of(cls, recipe: Recipe) -> Best:
        name = recipe.metric_for_best_model or "loss"
        key = name if name.startswith("eval_") else f"eval_{name}"
        greater = recipe.greater_is_better
        return cls(key, not key.endswith("loss") if greater is None else greater, recipe.early_stopping_steps)

    def judge(self, step: int, figures: Mapping[str, float]) -> bool:
        """True if this evaluation is the best so far. Raises UnknownNameError if it lacks the metric, NumericsError for
        NaN or infinity: NaN would stay the best for ever, since no value compares as better."""
        if self.key not in figures:
            raise UnknownNameError("metric", self.key, figures, where="metric_for_best_model")
        value = figures[self.key]
        check_finite({self.key: value})
        if self.metric is None or (value > self.metric if self.greater_is_better else value < self.metric):
            self.metric, self.step, self.since = value, step, 0
            return True
        self.since += 1
        return False

    @property
    def is_exhausted(self) -> bool:
        return self.patience is not None and self.since >= self.patience

    def state(self) -> dict[str, Any]:
        return {"metric": self.metric, "step": self.step, "checkpoint": self.checkpoint, "since": self.since}

    def restore(self, state: Mapping[str, Any], beside: Path) -> None:
        """`beside`: the checkpoint to resume from; a best checkpoint that is not at its path is looked up there."""
        self.metric, self.step = state["metric"], state["step"]
        self.checkpoint, self.since = state["checkpoint"], state["since"]
        if self.checkpoint and not Path(self.checkpoint).is_dir():
            self.checkpoint = str(beside.parent / Path(self.checkpoint).name)

    def hugging_face(self) -> dict[str, Any]:
        """The keys of `trainer_state.json`."""
        return {
            "best_global_step": self.step,
            "best_metric": self.metric,
            "best_model_checkpoint": self.checkpoint,
        }
