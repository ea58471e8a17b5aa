"""The recipe arguments of commands: `FILE [KEY=VALUE ...]`, as in llamafactory-cli, or --recipe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

_F = TypeVar("_F", bound=Callable[..., Any])


def recipe_arguments(function: _F) -> _F:
    """Adds --recipe and the arguments, which `recipe_of` parses."""
    option = click.option("--recipe", "recipe_path", type=click.Path(path_type=Path), help="The same as FILE.")
    return option(click.argument("arguments", nargs=-1, metavar="[FILE] [KEY=VALUE]...")(function))


def recipe_of(option: Path | None, arguments: Sequence[str], command: str) -> tuple[Path, tuple[str, ...]]:
    """(the recipe's file, its overrides). Raises click.UsageError without a file, and for two files."""
    path, overrides = find_recipe(option, arguments)
    if path is None:
        given = f" ({overrides[0]!r} changes a recipe's key)" if overrides else ""
        raise click.UsageError(f"name a recipe: kt-runtime {command} FILE [KEY=VALUE ...]{given}")
    return path, overrides


def find_recipe(option: Path | None, arguments: Sequence[str]) -> tuple[Path | None, tuple[str, ...]]:
    """As `recipe_of`, but the recipe may be missing."""
    files = [argument for argument in arguments if _is_file(argument)]
    named = [*([str(option)] if option is not None else []), *files]
    if len(named) > 1:
        raise click.UsageError(
            f"{named[1]!r} is not of the form KEY=VALUE, and the recipe is {named[0]!r} already; one run has one recipe"
        )
    overrides = tuple(argument for argument in arguments if argument not in files)
    return (Path(named[0]) if named else None), overrides


def _is_file(argument: str) -> bool:
    """Whether `argument` is the recipe's file. An override has a "=", and is never the path of an existing file."""
    return "=" not in argument or Path(argument).is_file()
