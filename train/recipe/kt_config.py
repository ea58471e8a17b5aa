"""The `kt_config:` mapping of kt-kernel 0.7.2: the fields of `configs/recipe_keys.yaml`, with or without prefix `kt_`.

Fields that repeat a recipe key set that key. Fields that describe the loaded experts are kept, and the command compares
them with the resident model. The others have no effect. Unknown fields are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kt_runtime.documents import shown
from kt_runtime.train.recipe.checks import nearest, optional
from kt_runtime.train.recipe.draft import Draft
from kt_runtime.train.recipe.fields import HONOURED
from kt_runtime.train.recipe.others import TABLE, KtField

FIELDS: Mapping[str, KtField] = TABLE.kt_config


def line(field: KtField) -> str:
    """What the field means, for the documentation."""
    return f"another name of {field.sets}" if field.sets else field.line


def apply(draft: Draft, fields: dict[str, Any] | None) -> None:
    kept: dict[str, Any] = {}
    for written_name, value in (fields or {}).items():
        name = written_name.removeprefix("kt_")
        full = f"kt_config.{written_name}"
        draft.places.setdefault(full, draft.where("kt_config"))
        draft.written[full] = value
        if f"kt_config.{name}" != full:
            draft.places[f"kt_config.{name}"] = draft.places[full]
        if name in kept:
            draft.problem(full, "is given with and without the prefix kt_")
        elif name == "enabled" and value is True:
            continue  # written by accelerate-kt itself
        elif name not in FIELDS:
            why = (
                "kt-kernel sets it itself" if name in TABLE.kt_config_internal else "kt-kernel 0.7.2 has no such field"
            )
            draft.problem(full, f"{why}{nearest(name, list(FIELDS))}; known: {', '.join(FIELDS)}")
        else:
            kept[name] = _apply_field(draft, full, name, value)
    draft.values["kt_config"] = {name: value for name, value in kept.items() if value is not None}


def _apply_field(draft: Draft, full: str, name: str, value: Any) -> Any:
    known = FIELDS[name]
    try:
        checked = (optional(HONOURED[known.sets].metadata["check"]) if known.sets else known.check)(value)
    except ValueError as error:
        draft.problem(full, str(error))
        return None
    if known.kind == "refused" and value not in (None, known.passes):
        draft.problem(full, known.line)
    elif known.kind == "warned":
        draft.note(full, f"no effect: {known.line}")
    elif name == "activation_policy" and checked is not None:
        _activation_policy(draft, full, checked)
    elif known.sets is not None and checked is not None:
        _set(draft, full, known.sets, checked)
    return checked


def _set(draft: Draft, full: str, key: str, value: Any) -> None:
    if draft.is_written(key) and draft.values.get(key) != value:
        draft.problem(
            full, f"{key} is {shown(key, draft.written[key])} at {draft.where(key)}; leave one of the two out"
        )
        return
    draft.values[key] = value
    draft.places.setdefault(key, draft.where(full))


def _activation_policy(draft: Draft, full: str, policy: dict[str, Any]) -> None:
    words = ("retain", "recompute")
    for device, word in policy.items():
        if device not in ("cpu", "gpu") or word not in words:
            draft.problem(full, "must be a mapping of cpu and gpu to retain or recompute")
            return
    if not policy:
        return
    word = policy.get("cpu", policy.get("gpu"))
    if len(set(policy.values())) > 1:
        draft.note(full, f"there is one policy for both: {word}")
    draft.values["disable_gradient_checkpointing"] = word == "retain"
