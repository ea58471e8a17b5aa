"""The learning-rate schedules of `transformers.get_scheduler` and the settings of each.

A table instead of signatures, so that checking a recipe does not import transformers; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kt_runtime.train.recipe.checks import Check, nearest, number, one_of, optional, truth, whole

_CYCLES = {"num_cycles": number(0, above=True)}
_LEAST = {"min_lr": optional(number(0)), "min_lr_rate": optional(number(0, upto=1))}
_BY_METRIC: dict[str, Check] = {
    "mode": one_of("min", "max"),
    "factor": number(0, 1, above=True),
    "patience": whole(0),
    "threshold": number(0),
    "threshold_mode": one_of("rel", "abs"),
    "cooldown": whole(0),
    "min_lr": number(0),
    "eps": number(0),
}
BY_METRIC = ("reduce_lr_on_plateau", "greedy")
"""Schedules that depend on an evaluation metric, so they need evaluations; all others are functions of the step."""

ARGUMENTS: Mapping[str, Mapping[str, Check]] = {
    "linear": {},
    "cosine": _CYCLES,
    "cosine_with_restarts": {"num_cycles": whole(1)},
    "polynomial": {"lr_end": number(0), "power": number(0, above=True)},
    "constant": {},
    "constant_with_warmup": {},
    "inverse_sqrt": {"timescale": optional(whole(1))},
    "reduce_lr_on_plateau": _BY_METRIC,
    "cosine_with_min_lr": {**_CYCLES, **_LEAST},
    "cosine_warmup_with_min_lr": {**_CYCLES, **_LEAST, "warmup_lr_rate": optional(number(0, upto=1))},
    "warmup_stable_decay": {
        "num_decay_steps": whole(1),
        "num_stable_steps": optional(whole(0)),
        "warmup_type": one_of("linear", "cosine", "1-sqrt"),
        "decay_type": one_of("linear", "cosine", "1-sqrt"),
        "min_lr_ratio": number(0, upto=1),
        **_CYCLES,
    },
    "greedy": {
        **_BY_METRIC,
        "warmup": whole(0),
        "max_lr": number(0, above=True),
        "smooth": truth,
        "window_size": whole(1),
        "reset_start": whole(0),
    },
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
