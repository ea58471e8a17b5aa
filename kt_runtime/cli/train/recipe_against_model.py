"""Checks a recipe against the model and the server that will train it, for `train` and its checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kt_runtime.errors import InvalidValueError, UserError

if TYPE_CHECKING:
    from kt_runtime.train.recipe import Recipe
    from kt_runtime.wire.replies import StatusReply


def check_rank(recipe: Recipe, max_rank: int | None) -> None:
    """Raises, with the recipe's line, the error of a rank that the resident would refuse during the run.

    `max_rank`: the server's, None without a server."""
    if max_rank is not None and recipe.lora_rank > max_rank:
        raise InvalidValueError(
            f"{recipe.where('lora_rank')}: lora_rank: {recipe.lora_rank}: the server serves adapters up to rank "
            f"{max_rank}; lower it, or start the server with --max-lora-rank {recipe.lora_rank}"
        )


def check_targets(recipe: Recipe, config: dict[str, Any]) -> None:
    """Raises InvalidValueError, with the recipe's line, for a target that the model does not have."""
    from kt_runtime.families import resolve_targets

    try:
        resolve_targets(config, recipe.lora_target)
    except UserError as error:
        raise InvalidValueError(f"{recipe.where('lora_target')}: lora_target: {error}") from None


def say_resident_notes(recipe: Recipe, status: StatusReply, say: Callable[[str], None]) -> None:
    """Prints where the recipe's placement and memory settings differ from the resident model's."""
    from kt_runtime.serve.memory.resident_notes import placement_notes, resident_notes

    for note in [*placement_notes(recipe, status), *resident_notes(recipe, status)]:
        say(note)
