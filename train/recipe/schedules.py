"""The learning-rate schedules of `transformers.get_scheduler` and the settings of each.

A table instead of signatures, so that checking a recipe does not import transformers; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kt_runtime.train.recipe.checks import Check, nearest
from kt_runtime.train.recipe.others import TABLE

BY_METRIC = ("reduce_lr_on_plateau", "greedy")
"""Schedules that depend on an evaluation metric, so they need evaluations; all others are functions of the step."""

ARGUMENTS: Mapping[str, Mapping[str, Check]] = {
    name: {setting: allowed.check for setting, allowed in settings.items()}
    for name, settings in TABLE.schedules.items()
}
NAMES = tuple(ARGUMENTS)


def check_arguments(name: str, values: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """The schedule's settings, checked, and the problems as (setting or "", problem)."""
    known, checked, wrong = ARGUMENTS[name], dict[str, Any](), list[tuple[str, str]]()
    for key, value in values.items():
        if key not in known:
            listed = ", ".join(known) or "no settings"
            wrong.append((key, f"{name} does not know it; it has {listed}{nearest(key, list(known))}"))
            continue
        try:
            checked[key] = known[key](value)
        except ValueError as error:
            wrong.append((key, str(error)))
    if name.endswith("with_min_lr") and (values.get("min_lr") is None) == (values.get("min_lr_rate") is None):
        wrong.append(("", f"{name} needs min_lr or min_lr_rate, one of the two"))
    if name == "warmup_stable_decay" and "num_decay_steps" not in values:
        wrong.append(("", f"{name} needs num_decay_steps"))
    return checked, wrong
