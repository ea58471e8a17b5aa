"""`kt-runtime train --check`: all checks that are possible before a run, without side effects."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kt_runtime.cli.connection import ServerAPI, resident_client
from kt_runtime.cli.train.recipe_against_model import say_resident_notes
from kt_runtime.families import resolve_targets

if TYPE_CHECKING:
    from kt_runtime.train.recipe import Recipe
    from kt_runtime.train.run.cadence import Cadence
    from kt_runtime.train.run.inputs import Inputs

Say = Callable[[str], None]


def check_run(recipe: Recipe, inputs: Inputs, config: dict[str, Any], api: ServerAPI | None, say: Say) -> None:
    """Prints the run's plan. Raises the errors that would stop the run. `api`: the running server; only its status is
    read."""
    from kt_runtime.serve.memory.resident_notes import asked_placement, rule_file
    from kt_runtime.train.run.loop import check_lengths

    fingerprint = None
    if api is None:
        placement = asked_placement(recipe, config)
        for note in placement.notes if placement else ():
            say(note)
        rules = rule_file(recipe)
        say(f"no server is running: one would be started for the run{f' with --placement {rules}' if rules else ''}")
    else:
        with resident_client(api) as client:
            status = client.status()
        fingerprint = status.fingerprint
        say_resident_notes(recipe, status, say)
        check_lengths(recipe, inputs, status.context_tokens)
        say(f"the resident model is {status.model} at {api.url}")
    _print_plan(recipe, inputs, config, fingerprint, say)
    say("checked: nothing was started or changed")


def _print_plan(recipe: Recipe, inputs: Inputs, config: dict[str, Any], fingerprint: str | None, say: Say) -> None:
    """`fingerprint`: of the resident model, None without a server."""
    from kt_runtime.train.run.loop import resumed_from
    from kt_runtime.train.stages.dpo import described_reference
    from kt_runtime.train.stages.grpo import described
    from kt_runtime.train.stages.targets import patterns

    checkpoint, changes = resumed_from(recipe, inputs, fingerprint)
    for change in changes:
        say(change)
    modules = resolve_targets(config, recipe.lora_target)
    parameters = sum(
        recipe.lora_rank * (module.in_features + module.out_features) * max(1, module.num_experts) for module in modules
    )
    say(f"would train {parameters:,} parameters in {len(modules)} modules at rank {recipe.lora_rank}:")
    for pattern in patterns(module.name for module in modules):
        say(f"  {pattern}")
    if recipe.stage == "dpo":
        say(described_reference(recipe))
    if recipe.stage == "grpo":
        for line in described(recipe):
            say(line)
    if recipe.do_train:
        _print_steps(recipe, inputs, say)
    for name, rows in inputs.evaluation.items():
        say(f"evaluation{f' of {name}' if name else ''}: {len(rows)} rows, eval_strategy: {recipe.eval_strategy}")
    if checkpoint is not None:
        say(f"would resume from {checkpoint.path}, step {checkpoint.step}")
    elif recipe.do_train:
        _print_beginning(recipe.output_dir, say)
    if recipe.publish:
        every = f" and every {recipe.publish_every_steps} steps" if recipe.publish_every_steps else ""
        say(f"would publish the adapter as {recipe.publish} at the end{every}")


def _print_steps(recipe: Recipe, inputs: Inputs, say: Say) -> None:
    from kt_runtime.train.run import schedule
    from kt_runtime.train.run.cadence import Cadence
    from kt_runtime.train.stages import batches

    total = schedule.num_steps(recipe, batches.num_sequences(inputs.train, recipe))
    an_epoch = batches.steps_per_epoch(inputs.train, recipe)
    tokens = sum(row.num_tokens for row in inputs.train)
    trained = sum(row.num_trained for row in inputs.train)
    sizes = f"{recipe.per_device_train_batch_size} x {recipe.gradient_accumulation_steps} sequences"
    counts = f"{tokens:,} tokens, of which {trained:,} are trained"
    if recipe.stage == "grpo":
        sizes = f"{recipe.rows_per_step} prompts x {recipe.num_generations} answers"
        counts = f"{tokens:,} tokens of prompts"
    say(
        f"{total} optimizer steps of {sizes} ({total / an_epoch:.2f} epochs of {an_epoch} steps); an epoch has {counts}"
    )
    say(f"would {_cadence(recipe, Cadence(recipe, total, an_epoch))}")
    rates = schedule.Schedule(recipe, total)
    if rates.follows_metric:
        say(f"learning rate {recipe.lr_scheduler_type}: first {rates[0]:.2e}, then as evaluations say")
        return
    highest = max(rates[0], rates[min(schedule.num_warmup_steps(recipe, total), total - 1)])  # at the end of warm-up
    last = rates[total - 1]
    say(f"learning rate {recipe.lr_scheduler_type}: first {rates[0]:.2e}, highest {highest:.2e}, last {last:.2e}")


def _cadence(recipe: Recipe, cadence: Cadence) -> str:
    """The intervals of logging, saving and evaluation, with shares of all steps converted to steps."""
    strategies = {
        "log": (recipe.logging_strategy, cadence.logging_steps),
        "save": (recipe.save_strategy, cadence.save_steps),
        "evaluate": (recipe.eval_strategy, cadence.eval_steps),
    }
    when = {"no": "never", "epoch": "every epoch", "best": "each best evaluation"}
    return ", ".join(
        f"{what} {when.get(strategy, f'every {steps} steps')}" for what, (strategy, steps) in strategies.items()
    )


def _print_beginning(output_dir: Path, say: Say) -> None:
    say(f"would begin at step 0, in {output_dir}{' (replacing what is there)' if output_dir.exists() else ''}")
