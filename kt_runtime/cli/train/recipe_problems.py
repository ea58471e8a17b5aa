"""Reports all problems of a recipe in one message: its keys, model, adapter, every row of its data, the server.

A command stops at the first problem. Only then, all checks run once more and collect problems instead of raising them.
Neither run starts or changes anything.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kt_runtime.documents import ProblemsError, all_problems
from kt_runtime.errors import UserError

if TYPE_CHECKING:
    from kt_runtime.train.examples import Example, Pair, Prompt
    from kt_runtime.train.recipe import Recipe
    from kt_runtime.train.render.rendering import Renderer

MOST_OF_A_DATASET = 20
Status = Mapping[str, Any]


@contextlib.contextmanager
def with_all_problems(path: Path, overrides: tuple[str, ...], purpose: str, status: Status | None) -> Iterator[None]:
    """If a UserError ends the block, raises an error with all problems of the recipe at `path`, including that one.

    `purpose`: as for `read_recipe`. `status`: GET /kt/status of the server that would be used, None without one.
    """
    try:
        yield
    except UserError as first:
        found = _Found()
        with found.kept():
            _search(found, path, overrides, purpose, status)
        found.add(first)
        if len(found.problems) < 2:
            raise
        raise all_problems(path, found.problems) from None


@dataclass
class _Found:
    """Problems in the order in which they were found, each once."""

    problems: list[str] = field(default_factory=list)

    def add(self, error: UserError) -> None:
        for problem in error.problems if isinstance(error, ProblemsError) else [str(error)]:
            if problem not in self.problems:
                self.problems.append(problem)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Collects a UserError raised inside as a problem."""
        try:
            yield
        except UserError as error:
            self.add(error)


def _search(found: _Found, path: Path, overrides: tuple[str, ...], purpose: str, status: Status | None) -> None:
    from kt_runtime.cli.train.run_server import recipes_model
    from kt_runtime.cli.train.temporary_adapter import check_exists
    from kt_runtime.train.recipe import read_what_is_right
    from kt_runtime.train.render.rendering import Renderer
    from kt_runtime.train.run.checkpoints import to_resume
    from kt_runtime.train.run.trackers import check_trackers

    recipe, problems = read_what_is_right(path, list(overrides), purpose)
    for problem in problems:
        found.add(UserError(problem))
    with found.kept():
        check_trackers(recipe.report_to)
    directory = renderer = None
    if recipe.model_name_or_path:
        with found.kept():
            directory = recipes_model(recipe, status)
    if purpose != "train":
        with found.kept():
            check_exists(recipe.adapter_name_or_path, f"{recipe.where('adapter_name_or_path')}: adapter_name_or_path")
    if directory is not None:
        if purpose == "train":
            _search_model(found, recipe, directory, status)
        with found.kept():
            renderer = Renderer(directory, recipe)
    if purpose == "chat":
        return
    names = (*recipe.dataset, *recipe.eval_dataset)
    if purpose == "predict":
        names = recipe.eval_dataset or recipe.dataset
    _search_data(found, recipe, names, renderer, status)
    if purpose == "train" and recipe.output_dir != Path():
        with found.kept():
            to_resume(recipe)


def _search_model(found: _Found, recipe: Recipe, directory: Path, status: Status | None) -> None:
    """Checks the recipe's adapter and placement against the model's configuration and the server's limits."""
    from kt_runtime.cli.train.recipe_against_model import check_rank, check_targets
    from kt_runtime.cli.train.starting_adapter import with_starting_adapter
    from kt_runtime.serve.memory.resident_notes import asked_placement
    from kt_runtime.serve.models.checkpoint_files import read_config

    max_rank = None if status is None else int(status["max_lora_rank"])
    with found.kept():
        check_rank(recipe, max_rank)
    config = None
    with found.kept():
        config = read_config(directory)
    if config is None:
        return
    with found.kept():
        check_targets(recipe, config)
    with found.kept():
        with_starting_adapter(recipe, config, max_rank, lambda _: None)
    with found.kept():
        asked_placement(recipe, config if status is None else None)


def _search_data(
    found: _Found, recipe: Recipe, names: tuple[str, ...], renderer: Renderer | None, status: Status | None
) -> None:
    """Checks each dataset alone, so that an unreadable one does not hide the problems of the others."""
    from kt_runtime.train.run.inputs import Inputs
    from kt_runtime.train.run.loop import check_lengths

    rendered: list[Example | Pair | Prompt] = []
    for name in dict.fromkeys(names):
        rendered += _rows(found, recipe, name, renderer)
    if status is not None:
        with found.kept():
            check_lengths(recipe, Inputs(rendered, {}), int(status["context_tokens"]))


class _EnoughOfADataset(Exception):
    pass


def _rows(found: _Found, recipe: Recipe, name: str, renderer: Renderer | None) -> list[Example | Pair | Prompt]:
    """The rows of a dataset that can be rendered. Collects the first MOST_OF_A_DATASET problems of the other rows."""
    from kt_runtime.train.data import read_all_that_can_be

    before, rendered = len(found.problems), list["Example | Pair | Prompt"]()

    def report(error: UserError) -> None:
        found.add(error)
        if len(found.problems) - before >= MOST_OF_A_DATASET:
            raise _EnoughOfADataset

    try:
        for row in read_all_that_can_be(recipe, (name,), report):
            if renderer is None:
                continue
            try:
                item = renderer.render(row)
            except UserError as error:
                report(error)
            else:
                rendered += [item] if item is not None else []
    except _EnoughOfADataset:
        found.add(UserError(f"dataset {name}: there may be more; the first {MOST_OF_A_DATASET} problems are shown"))
    return rendered
