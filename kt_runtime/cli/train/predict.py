"""`kt-runtime predict`: answer a dataset's questions with the resident model and compare the answers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kt_runtime.cli.connection import ServerAPI, running_status, server_options, server_url
from kt_runtime.cli.recipe_argument import recipe_arguments, recipe_of
from kt_runtime.cli.train.recipe_problems import with_all_problems
from kt_runtime.cli.train.run_server import check_model, check_named_server, recipes_model, running_server
from kt_runtime.cli.train.temporary_adapter import CONFIG_FILE, adapter_in_use, check_exists, check_served, rank_of
from kt_runtime.errors import InvalidValueError

if TYPE_CHECKING:
    from kt_runtime.train.predict.run import Row
    from kt_runtime.train.recipe import Recipe
    from kt_runtime.train.render.rendering import Renderer


@dataclass(frozen=True)
class Prediction:
    """The validated inputs of a prediction. `adapter`: directory of the answering adapter, None: a served name, or the
    base. `is_running`: a server was running."""

    renderer: Renderer
    rows: Sequence[Row]
    adapter: Path | None
    is_running: bool


@click.command(name="predict", help=__doc__)
@click.option("--adapter", help="An adapter that is served. [default: the recipe's own]")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON on standard output.")
@recipe_arguments
@server_options
def command(
    recipe_path: Path | None,
    arguments: tuple[str, ...],
    adapter: str | None,
    as_json: bool,
    url: str | None,
    api_key: str | None,
) -> None:
    from kt_runtime.train.predict.metrics import check_packages
    from kt_runtime.train.recipe import read_recipe

    def say(line: str) -> None:
        click.echo(line, err=as_json)

    started = time.monotonic()
    recipe_path, overrides = recipe_of(recipe_path, arguments, "predict")
    status = running_status(url, api_key)
    with with_all_problems(recipe_path, overrides, "predict", status):
        recipe, notes = read_recipe(recipe_path, list(overrides), purpose="predict")
        check_packages()
        if recipe.output_dir == Path():
            raise InvalidValueError(f"{recipe_path}: output_dir is missing; the answers are written there")
        for note in notes:
            say(note)
        prepared = prepare_prediction(recipe, adapter, url, api_key, say, status)
    _print(_predict(recipe, prepared, adapter, url, api_key, say, started), as_json)


def predict_alone(
    recipe: Recipe,
    prepared: Prediction,
    url: str | None,
    api_key: str | None,
    say: Callable[[str], None],
    *,
    check: bool,
    as_json: bool,
) -> int:
    """Runs `train` for a recipe that only predicts. `check`: only prints the plan."""
    if not check:
        _print(_predict(recipe, prepared, None, url, api_key, say, time.monotonic()), as_json)
        return 0
    where = f"the server at {server_url(url)}" if prepared.is_running else "a server started for it"
    who = f"the adapter {prepared.adapter}" if prepared.adapter else "the base model"
    say(f"would ask {who} for {len(prepared.rows)} answers, of {where}, and write them to {recipe.output_dir}")
    say("checked: nothing was started or changed")
    return 0


def _print(results: Mapping[str, float], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(results, indent=2))
        return
    for figure, value in results.items():
        click.echo(f"  {figure:34} {value:10.4f}")


def _adapter_directory(recipe: Recipe) -> Path | None:
    """The adapter that the recipe has trained; else the one it names; else None, the base."""
    trained = recipe.do_train and (recipe.output_dir / CONFIG_FILE).is_file()
    return recipe.output_dir if trained else recipe.adapter_name_or_path


def _predict(
    recipe: Recipe,
    prepared: Prediction,
    adapter: str | None,
    url: str | None,
    api_key: str | None,
    say: Callable[[str], None],
    started: float,
) -> dict[str, float]:
    from kt_runtime.serve.memory.resident_notes import rule_file
    from kt_runtime.train.predict.run import predict

    rank, rules = rank_of(prepared.adapter), rule_file(recipe)
    with (
        running_server(recipe.model_name_or_path, url, api_key, say, max_lora_rank=rank, placement=rules) as api,
        adapter_in_use(api, adapter, prepared.adapter, say) as name,
    ):
        preparation_s = time.monotonic() - started
        return predict(
            api.url, api_key, recipe, prepared.renderer, say, name, preparation_s=preparation_s, rows=prepared.rows
        )


def prepare_prediction(
    recipe: Recipe,
    adapter: str | None,
    url: str | None,
    api_key: str | None,
    say: Callable[[str], None],
    status: Mapping[str, Any] | None,
) -> Prediction:
    """Reads and checks all inputs before a server is started. `status`: of the running server, None without one."""
    from kt_runtime.serve.memory.resident_notes import asked_placement
    from kt_runtime.serve.models.checkpoint_files import read_config
    from kt_runtime.train.predict.run import read_rows
    from kt_runtime.train.render.rendering import Renderer

    model, is_running = recipe.model_name_or_path, status is not None
    directory = None if adapter else _adapter_directory(recipe)
    check_exists(directory, f"{recipe.where('adapter_name_or_path')}: adapter_name_or_path")
    if is_running and adapter:
        check_served(ServerAPI(server_url(url), api_key), adapter)
    model_directory = recipes_model(recipe, status)
    if not is_running:
        check_named_server(url, model)
    asked_placement(recipe, None if is_running else read_config(model_directory))
    renderer = Renderer(model_directory, recipe)
    if comparison := renderer.comparison():
        say(comparison)
    return Prediction(renderer, read_rows(recipe, renderer, say), directory, is_running)


def predict_after_training(
    api: ServerAPI, api_key: str | None, recipe: Recipe, say: Callable[[str], None]
) -> dict[str, float]:
    """Runs `do_predict` at the end of `train`, with the newly trained adapter as published, or as saved."""
    from kt_runtime.train.predict.run import predict
    from kt_runtime.train.render.rendering import Renderer

    started = time.monotonic()
    renderer = Renderer(check_model(recipe.model_name_or_path, api.get("/kt/status")), recipe)
    published = recipe.publish if recipe.do_train else None
    directory = None if published else _adapter_directory(recipe)
    with adapter_in_use(api, published, directory, say) as name:
        preparation_s = time.monotonic() - started
        return predict(api.url, api_key, recipe, renderer, say, name, preparation_s=preparation_s)
