"""One training run: sends batches to the resident, steps its optimizer, evaluates, saves, publishes.

The trainer owns the recipe and the data; the resident owns the model, the master weights and the optimizer's state. If
the trainer dies, the resident continues serving. The next run over the same output directory closes the orphaned
session and resumes from the last complete checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator

from kt_runtime.errors import ConflictError, InvalidValueError, KtError
from kt_runtime.files import exclusive_lock
from kt_runtime.train.examples import Example, Pair, Prompt
from kt_runtime.train.recipe import Recipe
from kt_runtime.train.resident import Resident
from kt_runtime.train.run import checkpoints, schedule
from kt_runtime.train.run.cadence import Cadence
from kt_runtime.train.run.checkpoints import Checkpoint
from kt_runtime.train.run.display import Display
from kt_runtime.train.run.inputs import Inputs
from kt_runtime.train.run.interruption import Interruption
from kt_runtime.train.run.journal import Journal
from kt_runtime.train.run.run_identity import identity, settings
from kt_runtime.train.run.session import objective_of, open_session, session_name, start_tracking
from kt_runtime.train.run.training import RunResult, Training
from kt_runtime.train.stages import batches
from kt_runtime.train.stages.grpo import Sampling
from kt_runtime.train.stages.reference_logprobs import Serving
from kt_runtime.wire.replies import StatusReply

LOCK_FILE = ".kt-runtime.lock"


def run(
    client: Resident,
    recipe: Recipe,
    inputs: Inputs,
    display: Display,
    *,
    parameters: int = 0,
    serving: Serving | None = None,
    sampling: Sampling | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> RunResult:
    """Trains, evaluates, saves and publishes. Raises ConflictError when another trainer uses the output directory.

    `parameters`: model parameters used per token. `serving`: access to the serving path, for a recipe with
    `ref_logprobs: serving`. `sampling`: for `stage: grpo`. The first SIGINT ends the run after its current step, and
    saves it.
    """
    recipe.output_dir.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(recipe.output_dir / LOCK_FILE, "output directory"):
        status = client.status()
        check_routing_replay(recipe, status.kept_routes is not None)
        check_lengths(recipe, inputs, status.context_tokens)
        checkpoint, changes = resumed_from(recipe, inputs, status.fingerprint)
        for change in changes:
            display.say(change)
        with (
            _session(client, status, recipe, checkpoint, display) as session,
            start_tracking(recipe, first_step=checkpoint.step if checkpoint else 0) as trackers,
            Interruption(display.say) as interruption,
        ):
            cadence = _cadence(recipe, inputs)
            journal = Journal(recipe.output_dir, cadence, display, trackers, parameters=parameters, clock=clock)
            if sampling is not None:
                sampling = dataclasses.replace(sampling, exact=status.exact)
            objective = objective_of(
                client,
                session,
                recipe,
                inputs.train,
                serving,
                display.say,
                sampling=sampling,
                total_steps=cadence.total_steps,
            )
            training = Training(
                client, session, recipe, inputs, journal, objective, cadence, display, interruption, status
            )
            with contextlib.closing(objective):
                training.start(checkpoint)
                return training.finish(training.steps())


def resumed_from(recipe: Recipe, inputs: Inputs, fingerprint: str | None) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint that the run resumes from, and a line for each setting that has changed since.

    `fingerprint`: of the resident model; None: not known yet, the checkpoint's is assumed. Raises as
    `checkpoints.to_resume` and `checkpoints.check_same_run`.
    """
    checkpoint = checkpoints.to_resume(recipe)
    if checkpoint is None:
        return None, []
    identified = identity(recipe, inputs, fingerprint or checkpoint.ours["identity"]["model"])
    return checkpoint, checkpoints.check_same_run(checkpoint, identified, settings(recipe))


def check_routing_replay(recipe: Recipe, keeps_routes: bool) -> None:
    """Raises ConflictError for a recipe that asks for routes of a server that keeps none."""
    if recipe.stage == "grpo" and recipe.routing_replay != "off" and not keeps_routes:
        raise ConflictError(
            f"{recipe.where('routing_replay')}: routing_replay: {recipe.routing_replay}: the server keeps no routes; "
            "start it with --routing-replay SIZE, such as 256MiB"
        )


def check_lengths(recipe: Recipe, inputs: Inputs, context_tokens: int) -> None:
    """Raises InvalidValueError for a row that is longer than the server's context, for a prompt with its answer."""
    rows = [row for found in (inputs.train, *inputs.evaluation.values()) for row in found]
    prompts = [row for row in rows if isinstance(row, Prompt)]
    longest_prompt = max(prompts, key=lambda row: row.num_tokens, default=None)
    if longest_prompt is not None and longest_prompt.num_tokens + recipe.max_new_tokens > context_tokens:
        raise InvalidValueError(
            f"{recipe.where('max_new_tokens')}: max_new_tokens: {recipe.max_new_tokens}: the prompt at "
            f"{longest_prompt.where} has {longest_prompt.num_tokens} tokens, and the server's context is "
            f"{context_tokens}; lower max_new_tokens or cutoff_len, or serve with a longer context"
        )
    sequences = (
        each
        for row in rows
        for each in (row.examples if isinstance(row, Pair) else (row,) if isinstance(row, Example) else ())
    )
    longest = max(sequences, key=lambda each: each.num_tokens, default=None)
    if longest is not None and longest.num_tokens > context_tokens:
        raise InvalidValueError(
            f"{recipe.where('cutoff_len')}: cutoff_len: {recipe.cutoff_len}: {longest.where} has {longest.num_tokens} "
            f"tokens, and the server's context is {context_tokens}; lower cutoff_len, or serve with a longer context"
        )


def _cadence(recipe: Recipe, inputs: Inputs) -> Cadence:
    if not recipe.do_train:
        return Cadence(recipe, 0, 1)
    total = schedule.num_steps(recipe, batches.num_sequences(inputs.train, recipe))
    return Cadence(recipe, total, batches.steps_per_epoch(inputs.train, recipe))


@contextlib.contextmanager
def _session(
    client: Resident, status: StatusReply, recipe: Recipe, checkpoint: Checkpoint | None, display: Display
) -> Iterator[str]:
    """The run's session. KeyboardInterrupt leaves it open: closing it would wait for calls in flight."""
    name = session_name(recipe.output_dir)
    if name in [info.session for info in status.sessions]:
        client.close_session(name)
    open_session(client, name, recipe, display.say)
    try:
        if checkpoint is not None:
            client.load(name, str(checkpoint.path))
        yield name
    except Exception:
        with contextlib.suppress(KtError):  # the original error is more important
            client.close_session(name)
        raise
    client.close_session(name)
