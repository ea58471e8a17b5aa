"""A run's session in the resident: the adapter that is trained, and its objective."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import cast

from kt_runtime.errors import InvalidValueError
from kt_runtime.train.recipe import Recipe
from kt_runtime.train.resident import Resident
from kt_runtime.train.run.run_identity import all_settings
from kt_runtime.train.run.trackers import Tracker, open_trackers
from kt_runtime.train.stages.dpo import Dpo, described_reference, reference_adapter
from kt_runtime.train.stages.grpo import Grpo, Sampling, described
from kt_runtime.train.stages.objective import Objective, Row
from kt_runtime.train.stages.reference_logprobs import Serving
from kt_runtime.train.stages.sft import Sft
from kt_runtime.train.stages.targets import patterns
from kt_runtime.wire import LoraSettings
from kt_runtime.wire.messages import Activations
from kt_runtime.wire.status import SessionInfo

Say = Callable[[str], None]


def session_name(output_dir: Path) -> str:
    """The session name, equal for every run over one output directory."""
    absolute = str(output_dir.resolve())
    readable = re.sub(r"[^A-Za-z0-9_.-]+", "-", output_dir.name).strip("-.") or "run"
    return f"{readable[:64]}-{hashlib.sha256(absolute.encode()).hexdigest()[:8]}"


def lora_settings(recipe: Recipe) -> LoraSettings:
    """Dropout in SFT only. Preference training compares two models, and reinforcement learning a model with the one
    that sampled; dropout would make each call another policy."""
    return LoraSettings(
        rank=recipe.lora_rank,
        alpha=recipe.served_alpha,
        dropout=recipe.lora_dropout if recipe.stage == "sft" else 0.0,
        targets=list(recipe.lora_target),
        seed=recipe.seed,
    )


def open_session(client: Resident, name: str, recipe: Recipe, say: Say) -> SessionInfo:
    """Creates the session. Prints the trained modules and, in preference training, the reference."""
    reference = reference_adapter(recipe)
    info = client.create_session(
        name,
        lora_settings(recipe),
        _absolute(recipe.adapter_name_or_path),
        reference=_absolute(reference),
        publishes=recipe.publish if recipe.do_train else None,
        take_over=recipe.publish_take_over,
    )
    say(described_session(info))
    if recipe.stage == "dpo":
        say(described_reference(recipe))
    if recipe.stage == "grpo":
        for line in described(recipe):
            say(line)
    if recipe.stage != "sft" and recipe.lora_dropout:
        where = recipe.where("lora_dropout")
        say(f"{where}: lora_dropout: {recipe.lora_dropout:g}: not used; {recipe.stage} has no dropout")
    return info


def described_session(info: SessionInfo) -> str:
    head = f"training {info.num_parameters:,} parameters in {len(info.modules)} modules at rank {info.rank}:"
    return "\n  ".join([head, *patterns(info.modules)])


def objective_of(
    client: Resident,
    session: str,
    recipe: Recipe,
    train: Sequence[Row],
    serving: Serving | None,
    say: Say,
    *,
    sampling: Sampling | None = None,
    total_steps: int = 0,
) -> Objective:
    """`serving`: access to the served reference; required for `ref_logprobs: serving`, otherwise unused. `sampling`:
    required for `stage: grpo`, otherwise unused; `total_steps`: of the run, for that stage."""
    activations = cast(Activations, recipe.activations)
    if recipe.stage == "grpo":
        if sampling is None:
            raise InvalidValueError(f"{recipe.where('stage')}: stage: grpo: this run has no HTTP server to sample from")
        return Grpo(client, session, recipe, train, total_steps, sampling, say)
    if recipe.stage == "dpo":
        if recipe.ref_logprobs == "twin":
            return Dpo(client, session, recipe, train, activations)
        if serving is None:
            where = recipe.where("ref_logprobs")
            raise InvalidValueError(f"{where}: ref_logprobs: serving: this run has no HTTP server to ask; set twin")
        return Dpo(client, session, recipe, train, activations, serving, say)
    return Sft(client, session, activations)


@contextlib.contextmanager
def start_tracking(recipe: Recipe, first_step: int = 0) -> Iterator[list[Tracker]]:
    """The recipe's trackers, closed when the context ends. `first_step`: the step from which a run resumes."""
    with contextlib.ExitStack() as stack:
        name = recipe.run_name or recipe.output_dir.resolve().name
        trackers = open_trackers(recipe.report_to, recipe.output_dir, name, all_settings(recipe), first_step)
        for tracker in trackers:
            stack.callback(tracker.close)
        yield trackers


def _absolute(path: Path | None) -> str | None:
    return None if path is None else str(path.resolve())
