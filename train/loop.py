"""One training run: sends batches to the resident, steps its optimizer, keeps the journal, saves, publishes.

The trainer owns the recipe and the data; the resident owns the model, the masters and the optimizer's state. When the
trainer dies, the resident goes on serving; the next run over the same output directory closes the orphaned session.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kt_runtime.errors import ConflictError, InvalidValueError
from kt_runtime.files import exclusive_lock, visible_entries, write_file
from kt_runtime.train import batches, schedule
from kt_runtime.train.data import read_datasets
from kt_runtime.train.journal import Journal
from kt_runtime.train.recipe import Recipe
from kt_runtime.train.rendering import Example, Renderer
from kt_runtime.wire import Batch, ResidentClient
from kt_runtime.wire.messages import LoraSettings, PublishReply

ADAPTER_FILES = ("adapter_model.safetensors", "adapter_config.json")
LOCK_FILE = ".kt-runtime.lock"


@dataclass(frozen=True)
class RunResult:
    """`optim_finished_at`: Unix time, seconds, at which the last optimizer step had ended in the resident."""

    steps: int
    loss_first: float
    loss_last: float
    optim_finished_at: float
    checkpoint: str
    published: PublishReply | None


def read_examples(recipe: Recipe, renderer: Renderer, say: Callable[[str], None]) -> list[Example]:
    """Reads and renders the recipe's data; prints the first example with its trained tokens marked."""
    conversations = read_datasets(recipe.dataset_dir, recipe.dataset, recipe.max_samples)
    rendered = [renderer.render(row, recipe.cutoff_len, recipe.train_on_prompt) for row in conversations]
    examples = [example for example in rendered if example is not None]
    if dropped := len(rendered) - len(examples):
        say(f"{dropped} of {len(rendered)} rows have no trained token within cutoff_len={recipe.cutoff_len}: left out")
    if not examples:
        raise InvalidValueError(
            f"cutoff_len: {recipe.cutoff_len}: leaves no trained token in any of {len(rendered)} rows"
        )
    say(f"{len(examples)} examples; the first, trained tokens between «»:\n{renderer.marked(examples[0])}")
    return examples


def prepare_output(recipe: Recipe) -> None:
    """Creates the output directory. Raises ConflictError when it holds a run that the recipe would overwrite."""
    recipe.output_dir.mkdir(parents=True, exist_ok=True)
    results = [entry.name for entry in visible_entries(recipe.output_dir) if entry.name != LOCK_FILE]
    if results and not recipe.overwrite_output_dir:
        raise ConflictError(
            f"output_dir: {recipe.output_dir}: holds {results[0]} of an earlier run; choose another directory or say "
            "overwrite_output_dir: true"
        )


def run(client: ResidentClient, recipe: Recipe, examples: list[Example], say: Callable[[str], None]) -> RunResult:
    """Trains, saves and publishes. Raises ConflictError when another trainer uses the same output directory."""
    prepare_output(recipe)
    with exclusive_lock(recipe.output_dir / LOCK_FILE, "output directory"):
        session = session_name(recipe.output_dir)
        if session in [info.session for info in client.status().sessions]:
            client.close_session(session)
        info = client.create_session(session, _lora_settings(recipe))
        say(f"training {info.num_parameters:,} parameters in {len(info.modules)} modules at rank {info.rank}")
        try:
            return _train(client, session, recipe, examples, say)
        finally:
            client.close_session(session)


def session_name(output_dir: Path) -> str:
    """The same for every run over one output directory."""
    absolute = str(output_dir.resolve())
    readable = re.sub(r"[^A-Za-z0-9_.-]+", "-", output_dir.name).strip("-.") or "run"
    return f"{readable[:64]}-{hashlib.sha256(absolute.encode()).hexdigest()[:8]}"


def _lora_settings(recipe: Recipe) -> LoraSettings:
    return LoraSettings(
        rank=recipe.lora_rank,
        alpha=recipe.served_alpha,
        dropout=recipe.lora_dropout,
        targets=list(recipe.lora_target),
        seed=recipe.seed,
    )


def _train(
    client: ResidentClient, session: str, recipe: Recipe, examples: list[Example], say: Callable[[str], None]
) -> RunResult:
    total = schedule.num_steps(recipe, len(examples))
    rates = schedule.learning_rates(recipe, total)
    per_step = recipe.per_device_train_batch_size * recipe.gradient_accumulation_steps
    journal = Journal(recipe.output_dir, total, len(examples) / per_step, say)
    finished_at = 0.0
    for step, micro_batches in enumerate(batches.steps(examples, recipe, total), start=1):
        loss = _accumulate(client, session, micro_batches)
        answer = client.optim_step(
            session,
            rates[step - 1],
            beta1=recipe.adam_beta1,
            beta2=recipe.adam_beta2,
            epsilon=recipe.adam_epsilon,
            weight_decay=recipe.weight_decay,
            max_grad_norm=recipe.max_grad_norm,
            lora_plus_ratio=recipe.loraplus_lr_ratio or 1.0,
        )
        finished_at = answer.finished_at
        num_tokens = sum(batch.num_tokens for batch in micro_batches)
        write = step % recipe.logging_steps == 0 or step in (1, total)
        journal.step(loss, num_tokens, rates[step - 1], answer.grad_norm, write=write)
        if step % recipe.save_steps == 0 and step < total:
            _save(client, session, recipe, step, say)
    published = client.publish(session, recipe.publish) if recipe.publish else None
    if published:
        say(f"published {published.name} as version {published.version[:16]} in {published.publish_ms:.0f} ms")
    checkpoint = _save(client, session, recipe, total, say)
    journal.finish(recipe.output_dir)
    for name in ADAPTER_FILES:
        write_file(recipe.output_dir / name, (checkpoint / name).read_bytes())
    return RunResult(total, journal.losses[0], journal.losses[-1], finished_at, str(checkpoint), published)


def _accumulate(client: ResidentClient, session: str, micro_batches: list[Batch]) -> float:
    """Sends all micro-batches before it waits for the first, so that the resident never waits for the trainer."""
    tickets = [client.begin_forward_backward(session, batch) for batch in micro_batches]
    return sum(client.finish_forward(ticket, batch).loss for ticket, batch in zip(tickets, micro_batches, strict=True))


def _save(client: ResidentClient, session: str, recipe: Recipe, step: int, say: Callable[[str], None]) -> Path:
    path = (recipe.output_dir / f"checkpoint-{step}").resolve()
    client.save(session, str(path), replace=recipe.overwrite_output_dir)
    say(f"saved {path}")
    return path
