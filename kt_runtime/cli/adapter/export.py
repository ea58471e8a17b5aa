"""`kt-runtime export`: a recipe's adapter merged into its model, as `llamafactory-cli export` does it."""

from __future__ import annotations

from pathlib import Path

import click

from kt_runtime.cli.connection import ServerAPI, server_options, server_url
from kt_runtime.cli.recipe_argument import recipe_arguments, recipe_of
from kt_runtime.errors import InvalidValueError


@click.command(name="export")
@recipe_arguments
@click.option("--overwrite", is_flag=True, help="Replace export_dir if an export wrote it.")
@server_options
def command(
    recipe_path: Path | None, arguments: tuple[str, ...], overwrite: bool, url: str | None, api_key: str | None
) -> None:
    """Merge adapter_name_or_path into model_name_or_path and write the checkpoint to export_dir.

    FILE is a recipe in YAML or JSON, KEY=VALUE overrides what it says. No server is needed, unless the adapter
    is a served name.
    """
    from kt_runtime.cli.adapter.exports import export_adapter
    from kt_runtime.cli.adapter.place import choose_adapter
    from kt_runtime.train.recipe import read_recipe

    recipe, overrides = recipe_of(recipe_path, arguments, "export")
    chosen, notes = read_recipe(recipe, list(overrides), purpose="export")
    for note in notes:
        click.echo(note, err=True)
    if chosen.adapter_name_or_path is None:
        raise InvalidValueError(f"{recipe}: adapter_name_or_path is missing: there is nothing to merge")
    if chosen.export_dir is None:
        raise InvalidValueError(f"{recipe}: export_dir is missing: where the merged checkpoint is written")
    adapter = choose_adapter(
        str(chosen.adapter_name_or_path),
        None,
        chosen.model_name_or_path,
        lambda: ServerAPI(server_url(url), api_key),
    )
    export_adapter(
        adapter,
        chosen.export_dir,
        "merged",
        lambda line: click.echo(line, err=True),
        shard_gigabytes=chosen.export_size,
        overwrite=overwrite,
    )
    click.echo(f"{adapter.described} is in {chosen.export_dir}")
