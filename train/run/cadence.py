"""The optimizer steps at which a run logs, saves, evaluates and publishes. Steps count from 1."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kt_runtime.train.recipe import Recipe
from kt_runtime.train.recipe.fields import BEST


@dataclass(frozen=True)
class Cadence:
    """`epoch_steps`: optimizer steps of one pass over the data; a smaller last step counts."""

    recipe: Recipe
    total_steps: int
    epoch_steps: int

    @property
    def logging_steps(self) -> int:
        return self._steps(self.recipe.logging_steps)

    @property
    def save_steps(self) -> int:
        return self._steps(self.recipe.save_steps)

    @property
    def eval_steps(self) -> int:
        return self._steps(self.recipe.eval_steps or self.recipe.logging_steps)

    def epoch(self, step: int) -> float:
        """The number of passes over the data after `step`."""
        return step / self.epoch_steps

    def logs(self, step: int) -> bool:
        """The last step is always logged, so that the shortest run has a loss."""
        is_first = step == 1 and self.recipe.logging_first_step
        return is_first or step == self.total_steps or self._due(step, self.recipe.logging_strategy, self.logging_steps)

    def saves(self, step: int) -> bool:
        """With `save_strategy: best` evaluations trigger saving; the last step has no checkpoint of its own then."""
        if self.recipe.save_strategy == BEST:
            return False
        is_last = step == self.total_steps and self.recipe.save_strategy != "no"
        return is_last or self._due(step, self.recipe.save_strategy, self.save_steps)

    def evaluates(self, step: int) -> bool:
        is_last = step == self.total_steps and self.recipe.eval_strategy == "epoch"
        return is_last or self._due(step, self.recipe.eval_strategy, self.eval_steps)

    def publishes(self, step: int) -> bool:
        """True only before the last step: the end of a run publishes separately."""
        every = self.recipe.publish_every_steps
        return bool(self.recipe.publish and every and step % every == 0 and step < self.total_steps)

    def _steps(self, asked: float) -> int:
        """The number of steps; below 1 a share of all steps, rounded up as in transformers' TrainerState."""
        return max(1, math.ceil(self.total_steps * asked)) if asked < 1 else int(asked)

    def _due(self, step: int, strategy: str, every: int) -> bool:
        if strategy == "no":
            return False
        return step % (every if strategy == "steps" else self.epoch_steps) == 0
