"""The data of a run, for training and evaluation: read, rendered, split, and identified by a digest."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from kt_runtime.errors import InvalidValueError
from kt_runtime.train.data import read_datasets, read_named
from kt_runtime.train.data.reading import Read
from kt_runtime.train.examples import Pair, Prompt
from kt_runtime.train.recipe import Recipe
from kt_runtime.train.render.rendering import Renderer
from kt_runtime.train.stages.evaluation import identity_of, split
from kt_runtime.train.stages.objective import Row

Say = Callable[[str], None]


@dataclass(frozen=True)
class Inputs:
    """`evaluation`: name to rows, as in `Evaluator`; empty without an evaluation."""

    train: Sequence[Row]
    evaluation: Mapping[str, Sequence[Row]]

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the training rows in order: equal digests mean equal batches."""
        digest = hashlib.sha256()
        for row in self.train:
            for part in row.contents():
                digest.update(part)
        return digest.hexdigest()


def read_inputs(recipe: Recipe, renderer: Renderer, say: Say) -> Inputs:
    """Reads and renders all data of the recipe; prints the first example with its trained tokens marked."""
    train: list[Row] = []
    if recipe.dataset:
        train = _rendered(recipe, "dataset", read_datasets(recipe, recipe.dataset, say), renderer, say)
    evaluation: dict[str, list[Row]] = {}
    if recipe.eval_dataset and recipe.eval_on_each_dataset:
        for name in recipe.eval_dataset:
            rows = (row for _, row in read_named(recipe, (name,), say))
            evaluation[name] = _rendered(recipe, "eval_dataset", rows, renderer, say)
    elif recipe.eval_dataset:
        evaluation[""] = _rendered(
            recipe, "eval_dataset", read_datasets(recipe, recipe.eval_dataset, say), renderer, say
        )
    elif recipe.val_size:
        train, evaluation[""] = split(train, recipe.val_size, recipe.seed, [identity_of(row) for row in train])
    _show(train or next(iter(evaluation.values()), []), evaluation, renderer, say)
    return Inputs(train, evaluation)


def _rendered(recipe: Recipe, key: str, rows: Iterable[Read], renderer: Renderer, say: Say) -> list[Row]:
    rendered: list[Row] = renderer.render_all(rows, say)
    if not rendered:
        what = "a prompt" if recipe.stage == "grpo" else "a trained token"
        raise InvalidValueError(
            f"{recipe.where(key)}: {key}: no row of {', '.join(getattr(recipe, key))} has {what} within "
            f"cutoff_len={recipe.cutoff_len}"
        )
    return rendered


def _show(rows: Sequence[Row], evaluation: dict[str, list[Row]], renderer: Renderer, say: Say) -> None:
    if not rows:
        return
    kinds = {Pair: "pairs", Prompt: "prompts"}
    kind = kinds.get(type(rows[0]), "examples")
    held = "".join(f", {len(found)} to evaluate on{f' ({name})' if name else ''}" for name, found in evaluation.items())
    first = rows[0]
    marks = "" if kind == "prompts" else ", trained tokens between «»"
    say(f"{len(rows)} {kind}{held}; the first{marks}:")
    if isinstance(first, Pair):
        say(f"chosen:   {renderer.marked(first.chosen)}")
        say(f"rejected: {renderer.marked(first.rejected)}")
    else:
        say(renderer.marked(first))
