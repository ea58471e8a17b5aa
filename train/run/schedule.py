"""Learning rate over optimizer steps: `transformers.get_scheduler`, so that all schedule names keep their meaning.

The rates equal those of Hugging Face's Trainer: step i (from 0) uses the schedule's value before its i-th advance.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from kt_runtime.errors import InvalidValueError
from kt_runtime.train.recipe import Recipe
from kt_runtime.train.recipe.schedules import BY_METRIC


def num_steps(recipe: Recipe, num_examples: int) -> int:
    """Optimizer steps of the whole run. A smaller last batch of an epoch counts as a step."""
    if recipe.max_steps > 0:
        return recipe.max_steps
    return max(1, math.ceil(math.ceil(num_examples / recipe.rows_per_step) * recipe.num_train_epochs))


def num_warmup_steps(recipe: Recipe, steps: int) -> int:
    """`warmup_steps` overrides `warmup_ratio`; below 1 it is a share of the steps, rounded up."""
    warmup = recipe.warmup_steps or recipe.warmup_ratio or 0
    return int(warmup) if recipe.warmup_steps >= 1 else math.ceil(steps * warmup)


class Schedule:
    """The rate of each optimizer step. Two schedules depend on an evaluation metric: `evaluated` passes it to them, and
    checkpoints contain their `state`. The others are functions of the step and ignore `evaluated`."""

    def __init__(self, recipe: Recipe, steps: int) -> None:
        """Raises InvalidValueError for settings that transformers refuses."""
        import torch
        from transformers import get_scheduler

        self._optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=recipe.learning_rate)
        try:
            self._schedule: Any = get_scheduler(
                recipe.lr_scheduler_type,
                self._optimizer,
                num_warmup_steps=num_warmup_steps(recipe, steps),
                num_training_steps=steps,
                scheduler_specific_kwargs=dict(recipe.lr_scheduler_kwargs),
            )
        except (ValueError, TypeError) as error:
            raise InvalidValueError(
                f"{recipe.where('lr_scheduler_type')}: {recipe.lr_scheduler_type}: {error}"
            ) from None
        self.follows_metric = recipe.lr_scheduler_type in BY_METRIC
        self._rate = recipe.learning_rate

    def rate(self, step: int) -> float:
        """The rate of the step, counted from 0."""
        if self.follows_metric:
            return float(self._optimizer.param_groups[0]["lr"])
        return float(self._rate * self._schedule.lr_lambdas[0](step))

    def evaluated(self, metric: float) -> None:
        """`metric`: the latest evaluation's value of `metric_for_best_model`."""
        if self.follows_metric:
            self._schedule.step(metric)

    def __getitem__(self, step: int) -> float:
        return self.rate(step)

    def state(self) -> dict[str, Any]:
        """JSON values. Empty for a schedule that is a function of the step."""
        if not self.follows_metric:
            return {}
        state = {key: value for key, value in self._schedule.state_dict().items() if _is_json(value)}
        return {"rate": self.rate(0), "schedule": state}

    def restore(self, state: Mapping[str, Any]) -> None:
        if self.follows_metric and state:
            self._schedule.load_state_dict(dict(state["schedule"]))
            self._optimizer.param_groups[0]["lr"] = state["rate"]


def _is_json(value: Any) -> bool:
    """False for infinity, the initial best value, which a new schedule has anyway."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True
