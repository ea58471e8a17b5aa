"""A job as a recipe of `kt-runtime train`, with its data in the same directory.

ROOT/jobs/ftjob-ID/recipe.json
ROOT/jobs/ftjob-ID/data/dataset_info.json, train.jsonl, valid.jsonl
ROOT/jobs/ftjob-ID/start/              a copy of the adapter that training continues from
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kt_runtime.errors import InvalidValueError
from kt_runtime.files import write_json
from kt_runtime.serve.finetuning.jobs import JobRecord
from kt_runtime.serve.finetuning.protocol.bodies import MethodName
from kt_runtime.serve.finetuning.protocol.graders import StringCheck, read_grader
from kt_runtime.serve.finetuning.protocol.rows import translate
from kt_runtime.serve.requests.checks.refusal import Refusal

STAGES: Mapping[MethodName, str] = {"supervised": "sft", "dpo": "dpo", "reinforcement": "grpo"}
RATES: Mapping[MethodName, float] = {"supervised": 2e-4, "dpo": 2e-5, "reinforcement": 4e-5}
"""The learning rate that `learning_rate_multiplier` multiplies."""
EPOCHS: Mapping[MethodName, int] = {"supervised": 3, "dpo": 1, "reinforcement": 1}
BATCH, SENT_AT_ONCE, BETA, ANSWERS, ANSWER_TOKENS = 8, 8, 0.1, 8, 1024
LORA_RANK = 16
SHARE_OF_STEPS = 0.1
"""Share of a job's steps between two checkpoints, and between two evaluations."""
LOGGED_SHARE = 0.001
CHECKPOINTS_KEPT = 3
RECIPE_FILE, DATA, START = "recipe.json", "data", "start"
NAME_CHARACTERS = 24  # of the base's name in a result's
STARTING_FILES = ("adapter_config.json", "adapter_model.safetensors")


@dataclass(frozen=True)
class ServerFacts:
    """`directory`: of the base model. `max_lora_rank`, `context_tokens`: of the server."""

    directory: Path
    max_lora_rank: int
    context_tokens: int


class WrongFile(InvalidValueError):
    """`param`: the field of the request that names the file."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


def result_name(base: str, suffix: str | None, number: str) -> str:
    """The adapter's name: OpenAI's ft:BASE:SUFFIX:ID with "." for ":", which an adapter's name can't have."""
    parts = ["ft", _plain(base)[:NAME_CHARACTERS].strip("-."), *([_plain(suffix)] if suffix else []), number]
    return ".".join(parts)


def checkpoint_name(result: str, step: int) -> str:
    return f"{result}.ckpt-step-{step}"


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "-", text).strip("-") or "model"


def prepare(
    job: JobRecord, place: Path, output: Path, files: Mapping[str, Path], start: Path | None, facts: ServerFacts
) -> dict[str, Any]:
    """Writes data and recipe; returns the hyperparameters, all decided. Slow.

    `files`: "training_file" and, if the job has one, "validation_file". `start`: the directory of the adapter that
    training continues from. Raises WrongFile with the lines that are wrong, InvalidValueError, OSError.
    """
    data = place / DATA
    data.mkdir(mode=0o700, exist_ok=True)
    grader = None if job.grader is None else _grader(job.grader)
    columns = {name: name for name in ("messages", "tools")}
    if job.method == "dpo":
        columns |= {name: name for name in ("chosen", "rejected")}
    described, counts = {}, {}
    for param, path in files.items():
        name = "train" if param == "training_file" else "valid"
        try:
            counts[name] = translate(path, data / f"{name}.jsonl", job.method, grader)
        except FileNotFoundError:
            raise WrongFile("the file was deleted before the job had read it", param) from None
        except InvalidValueError as error:
            raise WrongFile(str(error), param) from None
        described[name] = {
            "file_name": f"{name}.jsonl",
            "formatting": "openai",
            "ranking": job.method == "dpo",
            "columns": columns,
        }
    write_json(data / "dataset_info.json", described, private=True)
    if start is not None:
        _copy_adapter(start, place / START)
    decided = decide(job.method, job.hyperparameters, counts["train"], facts)
    recipe = recipe_of(job, decided, place, output, facts, has_start=start is not None)
    write_json(place / RECIPE_FILE, recipe, private=True)
    return decided


def _grader(given: Mapping[str, Any]) -> StringCheck:
    try:
        return read_grader(given)
    except Refusal as refusal:  # it was checked when the job was created
        raise InvalidValueError(refusal.message) from None


def decide(method: MethodName, given: Mapping[str, Any], num_rows: int, facts: ServerFacts) -> dict[str, Any]:
    """The hyperparameters with this server's values for those that the client left to it."""
    decided: dict[str, Any] = {
        "n_epochs": EPOCHS[method],
        "batch_size": min(BATCH, num_rows),
        "learning_rate_multiplier": 1.0,
    }
    if method == "dpo":
        decided["beta"] = BETA
    if method == "reinforcement":
        decided |= {"compute_multiplier": 1.0, "eval_samples": 1, "reasoning_effort": "default"}
        decided["max_completion_tokens"] = min(ANSWER_TOKENS, facts.context_tokens // 2)
    decided |= given
    if decided["batch_size"] > num_rows:
        raise WrongFile(f"batch_size {decided['batch_size']}: the file has only {num_rows} rows", "training_file")
    most = facts.context_tokens - 1
    if decided.get("max_completion_tokens", 0) > most:
        raise InvalidValueError(
            f"max_completion_tokens {decided['max_completion_tokens']}: this server's context leaves at most {most}"
        )
    return decided


def recipe_of(
    job: JobRecord, decided: Mapping[str, Any], place: Path, output: Path, facts: ServerFacts, *, has_start: bool
) -> dict[str, Any]:
    """The recipe's keys (docs/recipes.md)."""
    recipe: dict[str, Any] = {
        "model_name_or_path": str(facts.directory),
        "stage": STAGES[job.method],
        "do_train": True,
        "dataset": "train",
        "dataset_dir": str(place / DATA),
        "cutoff_len": facts.context_tokens,
        "output_dir": str(output),
        "num_train_epochs": decided["n_epochs"],
        "learning_rate": RATES[job.method] * decided["learning_rate_multiplier"],
        "seed": job.seed,
        "logging_steps": LOGGED_SHARE,
        "save_steps": SHARE_OF_STEPS,
        "save_total_limit": CHECKPOINTS_KEPT,
        "publish": job.result,
        "publish_take_over": True,
    }
    if has_start:
        recipe["adapter_name_or_path"] = str(place / START)
    else:
        recipe["lora_rank"] = min(LORA_RANK, facts.max_lora_rank)
    if job.method == "reinforcement":
        recipe |= _reinforcement(job, decided, facts)
    else:
        at_once = max(size for size in range(1, SENT_AT_ONCE + 1) if decided["batch_size"] % size == 0)
        recipe["per_device_train_batch_size"] = at_once
        recipe["gradient_accumulation_steps"] = decided["batch_size"] // at_once
    if job.method == "dpo":
        recipe["pref_beta"] = decided["beta"]
    if job.validation_file is not None:
        recipe |= {
            "eval_dataset": "valid",
            "eval_strategy": "steps",
            "eval_steps": decided.get("eval_interval", SHARE_OF_STEPS),
        }
    return recipe


def _reinforcement(job: JobRecord, decided: Mapping[str, Any], facts: ServerFacts) -> dict[str, Any]:
    assert job.grader is not None
    new_tokens = decided["max_completion_tokens"]
    keys: dict[str, Any] = {
        "reward": _grader(job.grader).reward,
        "rollout_batch_size": decided["batch_size"],
        "num_generations": max(2, round(ANSWERS * decided["compute_multiplier"])),
        "max_new_tokens": new_tokens,
        "cutoff_len": max(2, facts.context_tokens - new_tokens),
    }
    if decided["reasoning_effort"] != "default":
        keys["reasoning_effort"] = decided["reasoning_effort"]
    return keys


def _copy_adapter(source: Path, target: Path) -> None:
    """A copy: the server may remove the version while the job waits."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(mode=0o700)
    for name in STARTING_FILES:
        try:
            shutil.copyfile(source / name, target / name)
        except FileNotFoundError:
            raise InvalidValueError(
                "the model to continue from is not on the server's disk (yet); create the job again later"
            ) from None
        os.chmod(target / name, 0o600)
