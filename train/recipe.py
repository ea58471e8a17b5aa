"""Reads a training recipe: a flat YAML or JSON mapping in LLaMA-Factory's vocabulary, plus `key=value` overrides.

All problems of a recipe are reported at once, each with file:line, key, value, what is allowed and the nearest known
name. A key that this version does not honour is refused by name: training something else than the recipe says would be
worse than not training.

PyYAML's `compose` is used instead of `load`: its nodes carry line numbers and show duplicate keys.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from kt_runtime.errors import InvalidValueError, NotFoundError

SCHEDULES = ("constant", "constant_with_warmup", "cosine", "linear")

# Accepted because every recipe carries them, and without effect here: they speak of loading, caching or processes,
# which are the server's business, and the result is the same.
WITHOUT_EFFECT = {
    "bf16": "the server's dtype holds",
    "cpu_infer": "the server's threads hold",
    "chunk_size": "the server's chunk size holds",
    "dataloader_num_workers": "rows are few and read once",
    "ddp_timeout": "there is one process",
    "kt_optimize_rule": "placement is the resident model's",
    "overwrite_cache": "nothing is cached",
    "preprocessing_num_workers": "rows are few and read once",
    "trust_remote_code": "the resident model is already loaded",
    "use_kt": "it always does",
}


@dataclass(frozen=True)
class Recipe:
    """A checked recipe. Sizes are in tokens or sequences, rates per optimizer step.

    `publish` is kt-runtime's own key: the adapter name under which the trained adapter is served. `warmup_steps`
    counts optimizer steps; `warmup_ratio` is the share of all of them. `max_steps` > 0 overrides `num_train_epochs`.
    """

    model_name_or_path: str
    output_dir: Path
    dataset: tuple[str, ...]
    dataset_dir: Path
    stage: str = "sft"
    do_train: bool = True
    finetuning_type: str = "lora"
    lora_rank: int = 8
    lora_alpha: float | None = None
    lora_dropout: float = 0.0
    lora_target: tuple[str, ...] = ("all",)
    use_rslora: bool = False
    loraplus_lr_ratio: float | None = None
    cutoff_len: int = 2048
    max_samples: int | None = None
    train_on_prompt: bool = False
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    learning_rate: float = 5e-5
    num_train_epochs: float = 3.0
    max_steps: int = -1
    lr_scheduler_type: str = "linear"
    warmup_ratio: float = 0.0
    warmup_steps: int = 0
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    seed: int = 42
    logging_steps: int = 500
    save_steps: int = 500
    overwrite_output_dir: bool = False
    publish: str | None = None

    @property
    def served_alpha(self) -> float:
        """The alpha whose plain alpha / rank gives the recipe's scaling; LLaMA-Factory's default is 2 x rank."""
        alpha = 2.0 * self.lora_rank if self.lora_alpha is None else self.lora_alpha
        return alpha * math.sqrt(self.lora_rank) if self.use_rslora else alpha


@dataclass(frozen=True)
class Entry:
    key: str
    value: Any
    where: str


def read_recipe(path: Path, overrides: list[str] | None = None) -> tuple[Recipe, list[str]]:
    """Returns the recipe and notes on keys that have no effect.

    Relative `dataset_dir` and `output_dir` are looked for from the working directory; a `dataset_dir` that is not there
    is tried beside the recipe. Raises NotFoundError for a missing file and InvalidValueError with every problem found.
    """
    entries, problems = _entries(path, overrides or [])
    values: dict[str, Any] = {}
    notes = []
    for entry in entries:
        if entry.key in WITHOUT_EFFECT:
            if not (entry.key.startswith(("overwrite", "preprocessing", "dataloader", "ddp"))):
                notes.append(f"{entry.where}: {entry.key}: no effect, {WITHOUT_EFFECT[entry.key]}")
            continue
        checker = _CHECKS.get(entry.key)
        if checker is None:
            near = difflib.get_close_matches(entry.key, [*_CHECKS, *WITHOUT_EFFECT], n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            problems.append(f"{entry.where}: {entry.key}: {entry.value!r}: not honoured by this version{hint}")
            continue
        try:
            values[entry.key] = checker(entry.value)
        except ValueError as error:
            problems.append(f"{entry.where}: {entry.key}: {entry.value!r}: {error}")
    problems += [
        f"{path}: {key} is missing" for key in ("model_name_or_path", "output_dir", "dataset") if key not in values
    ]
    if problems:
        raise InvalidValueError(
            f"{path}: {len(problems)} problem{'s' * (len(problems) > 1)}\n"
            + "".join(f"  {problem}\n" for problem in problems)
            + f"  honoured keys: {', '.join(sorted(_CHECKS))}"
        )
    directory = values.get("dataset_dir", Path("data"))
    if not directory.is_dir() and (path.parent / directory).is_dir():
        directory = path.parent / directory
    return Recipe(**{**values, "dataset_dir": directory}), notes


def _entries(path: Path, overrides: list[str]) -> tuple[list[Entry], list[str]]:
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise NotFoundError(f"{path}: no such recipe") from None
    except OSError as error:
        raise InvalidValueError(f"{path}: can't be read: {error.strerror}") from None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise InvalidValueError(f"{path}:{line}: byte {raw[error.start]:#04x} is not UTF-8; save it as UTF-8") from None
    problems: list[str] = []
    entries = _mapping(text, str(path), problems)
    known = {entry.key: index for index, entry in enumerate(entries)}
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key:
            problems.append(f"command line: {override!r} is not of the form key=value")
            continue
        try:
            entry = Entry(key, yaml.safe_load(value), "command line")
        except yaml.YAMLError:
            problems.append(f"command line: {override!r}: the value is not valid YAML")
            continue
        if key in known:
            entries[known[key]] = entry
        else:
            entries.append(entry)
    return entries, problems


def _mapping(text: str, name: str, problems: list[str]) -> list[Entry]:
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise InvalidValueError(f"{name}:{line}: not valid YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise InvalidValueError(f"{name}: not valid YAML: {error}") from None
    if node is None:
        raise InvalidValueError(f"{name}: is empty; a recipe is a mapping of keys to values")
    if not isinstance(node, yaml.MappingNode):
        raise InvalidValueError(f"{name}:{node.start_mark.line + 1}: a recipe is a mapping of keys to values")
    constructor = yaml.SafeLoader("")
    entries: list[Entry] = []
    first: dict[str, str] = {}
    for key_node, value_node in node.value:
        where = f"{name}:{key_node.start_mark.line + 1}"
        key = str(key_node.value)
        if key in first:
            problems.append(f"{where}: {key} stands at {first[key]} already")
            continue
        first[key] = where
        try:
            entries.append(Entry(key, constructor.construct_object(value_node, deep=True), where))
        except yaml.MarkedYAMLError as error:
            problems.append(f"{where}: {key}: {error.problem}")
    return entries


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("must be text")
    return value


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def _whole(least: int, most: int | None = None) -> Any:
    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least or (most and value > most):
            raise ValueError(f"must be a whole number of at least {least}" + (f" and at most {most}" if most else ""))
        return value

    return check


def _number(least: float, below: float = math.inf, above: bool = False) -> Any:
    """`above`: the bound itself is not allowed. YAML 1.1 reads 1e-4 as text: such text counts as the number."""

    def check(value: Any) -> float:
        allowed = f"must be a number {'above' if above else 'of at least'} {least}" + (
            f" and below {below}" if below < math.inf else ""
        )
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError(allowed)
        try:
            number = float(value)
        except ValueError:
            raise ValueError(allowed) from None
        if not math.isfinite(number) or number < least or number >= below or (above and number == least):
            raise ValueError(allowed)
        return number

    return check


def _one_of(*names: str) -> Any:
    def check(value: Any) -> str:
        if value not in names:
            raise ValueError(f"this version knows only {', '.join(names)}")
        return value

    return check


def _names(value: Any) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list) or not parts or not all(isinstance(part, str) and part.strip() for part in parts):
        raise ValueError("must be names separated by commas")
    return tuple(part.strip() for part in parts)


def _optional(check: Any) -> Any:
    return lambda value: None if value is None else check(value)


_CHECKS: dict[str, Any] = {
    "model_name_or_path": _text,
    "output_dir": lambda value: Path(_text(value)),
    "dataset": _names,
    "dataset_dir": lambda value: Path(_text(value)),
    "stage": _one_of("sft"),
    "do_train": _truth,
    "finetuning_type": _one_of("lora"),
    "lora_rank": _whole(1),
    "lora_alpha": _optional(_number(0, above=True)),
    "lora_dropout": _number(0, below=1),
    "lora_target": _names,
    "use_rslora": _truth,
    "loraplus_lr_ratio": _optional(_number(0, above=True)),
    "cutoff_len": _whole(2),
    "max_samples": _optional(_whole(1)),
    "train_on_prompt": _truth,
    "per_device_train_batch_size": _whole(1),
    "gradient_accumulation_steps": _whole(1),
    "learning_rate": _number(0, above=True),
    "num_train_epochs": _number(0, above=True),
    "max_steps": _whole(-1),
    "lr_scheduler_type": _one_of(*SCHEDULES),
    "warmup_ratio": _number(0, below=1),
    "warmup_steps": _whole(0),
    "weight_decay": _number(0),
    "max_grad_norm": _number(0),
    "adam_beta1": _number(0, below=1),
    "adam_beta2": _number(0, below=1),
    "adam_epsilon": _number(0, above=True),
    "seed": _whole(0, 2**32 - 1),
    "logging_steps": _whole(1),
    "save_steps": _whole(1),
    "overwrite_output_dir": _truth,
    "publish": _optional(_text),
}
assert set(_CHECKS) == {field.name for field in fields(Recipe)}, "every recipe field has one check"
