"""`kt-runtime train`: LoRA fine-tuning on the resident model of a running server, or of one started for the run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kt_runtime.cli.connection import ServerAPI, resident_client, server_options, server_url
from kt_runtime.errors import ConflictError

if TYPE_CHECKING:
    from kt_runtime.train.recipe import Recipe


@click.command(name="train", help=__doc__)
@click.option("--recipe", "recipe_path", required=True, type=click.Path(path_type=Path), help="A YAML or JSON recipe.")
@click.option("--check", is_flag=True, help="Check recipe and data, print the plan, and change nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on standard output.")
@click.argument("overrides", nargs=-1)
@server_options
def command(
    recipe_path: Path, check: bool, as_json: bool, overrides: tuple[str, ...], url: str | None, api_key: str | None
) -> None:
    from kt_runtime.train.loop import read_examples, run
    from kt_runtime.train.recipe import read_recipe
    from kt_runtime.train.rendering import Renderer
    from kt_runtime.train.schedule import num_steps

    def say(line: str) -> None:
        click.echo(line, err=as_json)

    recipe, notes = read_recipe(recipe_path, list(overrides))
    for note in notes:
        say(note)
    if check:
        examples = read_examples(recipe, Renderer(_local_directory(recipe)), say)
        say(f"{num_steps(recipe, len(examples))} optimizer steps; nothing was started or changed")
        return
    with _server(recipe, url, api_key, say) as api, resident_client(api) as client:
        status = client.status()
        _check_model(recipe, status.model, status.model_directory)
        examples = read_examples(recipe, Renderer(Path(status.model_directory)), say)
        result = run(client, recipe, examples, say)
    if as_json:
        published = result.published
        click.echo(
            json.dumps(
                {
                    **dataclasses.asdict(dataclasses.replace(result, published=None)),
                    "published": published
                    and {"name": published.name, "version": published.version, "publish_ms": published.publish_ms},
                }
            )
        )


@contextlib.contextmanager
def _server(recipe: Recipe, url: str | None, api_key: str | None, say: object) -> Iterator[ServerAPI]:
    """The running server, or one that is started for the run and ended after it."""
    from kt_runtime.cli.server_process import server

    assert callable(say)
    api = ServerAPI(server_url(url), api_key)
    if api.answers():
        yield api
        return
    log = Path(tempfile.mkdtemp(prefix="kt-runtime-")) / "server.log"
    say(f"no server at {api.url}: starting one for this run with {recipe.model_name_or_path}; its log is {log}")
    with server(recipe.model_name_or_path, ["--max-lora-rank", str(max(16, recipe.lora_rank))], log) as started:
        yield started


def _local_directory(recipe: Recipe) -> Path:
    from kt_runtime.serve.models import resolve_model

    return Path(resolve_model(recipe.model_name_or_path).directory)


def _check_model(recipe: Recipe, model: str, directory: str) -> None:
    """Raises ConflictError when the recipe's model is not the resident one."""
    wanted = recipe.model_name_or_path
    if wanted in (model, directory) or Path(wanted).resolve() == Path(directory).resolve():
        return
    from kt_runtime.errors import KtError

    with contextlib.suppress(KtError):
        if _local_directory(recipe).resolve() == Path(directory).resolve():
            return
    raise ConflictError(
        f"model_name_or_path: {wanted}: the server's resident model is {model} ({directory}); name that one, or train "
        "without a server, so that one is started with the recipe's model"
    )
