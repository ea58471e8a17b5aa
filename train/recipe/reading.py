"""Reads a recipe file and the command line's `key=value` overrides; reports all of their problems at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from kt_runtime.documents import Entry, Values, all_problems, compose, in_order, is_secret, read_file, shown_key
from kt_runtime.errors import InvalidValueError, UnknownNameError
from kt_runtime.train.recipe import constraints
from kt_runtime.train.recipe.aliases import APPLY
from kt_runtime.train.recipe.checks import nearest, truth
from kt_runtime.train.recipe.draft import Draft
from kt_runtime.train.recipe.fields import NULLABLE, Recipe
from kt_runtime.train.recipe.others import REFUSED, TABLE, WARNED
from kt_runtime.train.recipe.table import CHECKS, KNOWN

COMMAND_LINE = "command line"
DEEPEST = 8


def read_recipe(path: Path, overrides: list[str] | None = None, purpose: str = "train") -> tuple[Recipe, list[str]]:
    """Returns the recipe and notes: one line for each key whose lack of effect the user should know.

    `purpose` (train, predict, chat, export) decides which keys are needed. `output_dir` is relative to the working
    directory; a `dataset_dir` that does not exist is looked up next to the recipe.

    Raises NotFoundError for a missing file and InvalidValueError with every problem found, each with its line.
    """
    draft = _draft(path, overrides, purpose)
    if draft.problems:
        raise all_problems(path, draft.problems)
    return _recipe(draft, path), in_order(draft.notes, path)


def read_what_is_right(
    path: Path, overrides: list[str] | None = None, purpose: str = "train"
) -> tuple[Recipe, list[str]]:
    """The recipe with defaults in place of wrong values, and the problems. Serves a search for further problems, never
    a run. Raises as `read_recipe` for a file that is not a recipe at all."""
    draft = _draft(path, overrides, purpose)
    return _recipe(draft, path), draft.problems


def _draft(path: Path, overrides: list[str] | None, purpose: str) -> Draft:
    if purpose not in constraints.PURPOSES:
        raise UnknownNameError("purpose", purpose, constraints.PURPOSES)
    draft = Draft(str(path))
    for entry in _entries(path, overrides or [], draft.problems):
        _take(draft, entry)
    for key, apply in APPLY.items():
        if key in draft.values:
            apply(draft, draft.values.pop(key))
    constraints.check(draft, purpose)
    return draft


def _recipe(draft: Draft, path: Path) -> Recipe:
    # A key written as null gets its default, unless null is a valid value of its attribute.
    values = {key: value for key, value in draft.values.items() if value is not None or key in NULLABLE}
    places = {key: place for key, place in draft.places.items() if draft.written.get(key, place) is not None}
    directory = draft.get("dataset_dir")
    if not directory.is_dir() and (path.parent / directory).is_dir():
        values["dataset_dir"] = path.parent / directory
    return Recipe(**values, places=places, source=draft.source)


def _take(draft: Draft, entry: Entry) -> None:
    """Checks one key: its value is stored, or becomes a problem or a note."""
    key = entry.key
    draft.put(key, entry.value, entry.where)
    if isinstance(entry.value, tuple):
        draft.places.update({f"{key}.{part.key}": part.where for part in entry.value})
    if key in CHECKS:
        try:
            draft.values[key] = CHECKS[key](draft.written[key])
        except ValueError as error:
            draft.problem(key, str(error))
    elif key in REFUSED:
        if not _is_among(draft.written[key], REFUSED[key].passing):
            draft.problem(key, f"refused: {REFUSED[key].reason}")
    elif key in WARNED:
        warned = WARNED[key]
        if warned.reason and not _is_among(draft.written[key], warned.passing):
            draft.note(key, f"no effect: {warned.reason}")
    else:
        elsewhere = TABLE.grpo_elsewhere.get(key)
        draft.problem(key, f"no such key{f'; {elsewhere}' if elsewhere else nearest(key, list(KNOWN))}")


def _is_among(value: Any, passing: tuple[Any, ...]) -> bool:
    if any(isinstance(known, bool) for known in passing) and isinstance(value, str):
        try:
            value = truth(value)
        except ValueError:
            return False
    return value in passing


def _entries(path: Path, overrides: list[str], problems: list[str]) -> list[Entry]:
    node = read_file(path, "recipe")
    if not isinstance(node, yaml.MappingNode):
        raise InvalidValueError(f"{path}:{node.start_mark.line + 1}: a recipe is a mapping of keys to values")
    entries = Values(str(path), problems).entries(node)
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key.strip():
            problems.append(f"{COMMAND_LINE}: {shown_key(override)} is not of the form key=value")
            continue
        try:
            entries = _overridden(entries, key.strip().split("."), _override(text))
        except ValueError as error:
            said = "***" if is_secret(key) else shown_key(text)
            problems.append(f"{COMMAND_LINE}: {shown_key(key)}: {said}: {error}")
    return entries


def _overridden(entries: Sequence[Entry], path: Sequence[str], value: Any) -> list[Entry]:
    """`entries` with `value` at `path`: as in OmegaConf, `lr_scheduler_kwargs.min_lr=1e-6` overrides one entry of a
    mapping and keeps the others. The mapping may also be JSON text. Raises ValueError."""
    name, *deeper = path
    if len(path) > DEEPEST:
        raise ValueError(f"no key lies deeper than {DEEPEST} levels")
    if not name:
        raise ValueError("a part of the key is empty; a key within a mapping is MAPPING.KEY=value")
    if deeper:
        inside = next((entry.value for entry in entries if entry.key == name), None)
        if isinstance(inside, str):
            inside = _override(inside)
        value = tuple(_overridden(inside if isinstance(inside, tuple) else (), deeper, value))
    new = Entry(name, value, COMMAND_LINE)
    if not any(entry.key == name for entry in entries):
        return [*entries, new]
    return [new if entry.key == name else entry for entry in entries]


def _override(text: str) -> Any:
    """The value as YAML. Raises ValueError."""
    try:
        node = compose(text, COMMAND_LINE)
    except InvalidValueError:
        raise ValueError("the value is not valid YAML") from None
    if node is None:
        return None
    problems: list[str] = []
    value = Values(COMMAND_LINE, problems, has_lines=False).value(node)
    if problems:
        raise ValueError(problems[0].removeprefix(f"{COMMAND_LINE}: "))
    return value
