"""The data of a run, for training and evaluation: read, rendered, split, and identified by a digest."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from kt_runtime.errors import InvalidValueError
from kt_runtime.train.data import Conversation, Preference, read_datasets, read_named
from kt_runtime.train.examples import Pair
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
            for example in row.examples if isinstance(row, Pair) else (row,):
                digest.update(len(example.tokens).to_bytes(8, "little"))
                for array in (example.tokens, example.targets, example.trained):
                    digest.update(array.tobytes())
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


def _rendered(
    recipe: Recipe, key: str, rows: Iterable[Conversation | Preference], renderer: Renderer, say: Say
) -> list[Row]:
    rendered: list[Row] = renderer.render_all(rows, say)
    if not rendered:
        raise InvalidValueError(
            f"{recipe.where(key)}: {key}: no row of {', '.join(getattr(recipe, key))} has a trained token within "
            f"cutoff_len={recipe.cutoff_len}"
        )
    return rendered


def _show(rows: Sequence[Row], evaluation: dict[str, list[Row]], renderer: Renderer, say: Say) -> None:
    if not rows:
        return
    kind = "pairs" if isinstance(rows[0], Pair) else "examples"
    held = "".join(f", {len(found)} to evaluate on{f' ({name})' if name else ''}" for name, found in evaluation.items())
    first = rows[0]
    say(f"{len(rows)} {kind}{held}; the first, trained tokens between «»:")
    if isinstance(first, Pair):
        say(f"chosen:   {renderer.marked(first.chosen)}")
        say(f"rejected: {renderer.marked(first.rejected)}")
    else:
        say(renderer.marked(first))
