"""`adapter_name_or_path` of a recipe that trains: the whole adapter is checked first, then training continues from it.

As in LLaMA-Factory, training uses the adapter's own rank, alpha and modules; unlike there, a recipe that contradicts
them is not overridden silently.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kt_runtime.adapters import AdapterTensors, without_fillers
from kt_runtime.adapters.source import read_adapter
from kt_runtime.cli.adapter.place import MAX_RANK
from kt_runtime.errors import ConflictError
from kt_runtime.families import family_for, resolve_targets
from kt_runtime.families.base import GROUPS

if TYPE_CHECKING:
    from kt_runtime.train.recipe import Recipe


def with_starting_adapter(
    recipe: Recipe, config: Mapping[str, Any], max_rank: int | None, say: Callable[[str], None]
) -> Recipe:
    """The recipe with rank, alpha and targets of its starting adapter, if any; its own alpha and targets override.

    `max_rank`: the server's, None without a server. Reads the whole adapter and the one in `ref_model_adapters`.
    Raises AdapterError, NotFoundError, and ConflictError for a recipe that contradicts its adapter.
    """
    rank_limit = max_rank or MAX_RANK
    if recipe.ref_model_adapters:
        _read(recipe.ref_model_adapters, config, rank_limit)
    if not recipe.adapter_name_or_path:
        return recipe
    adapter = _read(recipe.adapter_name_or_path, config, rank_limit)
    for note in adapter.notes:
        say(f"{recipe.adapter_name_or_path}: {note}")
    if "lora_rank" in recipe.places and recipe.lora_rank != adapter.rank:
        raise ConflictError(
            f"{recipe.where('lora_rank')}: lora_rank: {recipe.lora_rank}: training starts from the adapter "
            f"{recipe.adapter_name_or_path}, which has rank {adapter.rank}; leave lora_rank out"
        )
    changes: dict[str, Any] = {"lora_rank": adapter.rank}
    if recipe.lora_alpha is None:
        changes |= {"lora_alpha": adapter.alpha, "use_rslora": False}
    if "lora_target" not in recipe.places:
        changes["lora_target"] = targets_of(adapter, config, str(recipe.adapter_name_or_path))
    changed = dataclasses.replace(recipe, **changes)
    say(
        f"starts from the adapter {recipe.adapter_name_or_path}: rank {changed.lora_rank}, alpha "
        f"{changed.served_alpha:g}, targets {', '.join(changed.lora_target)}"
    )
    return changed


def targets_of(adapter: AdapterTensors, config: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """The `lora_target` that selects exactly the adapter's modules. Raises ConflictError if there is none."""
    adapted = set(without_fillers(adapter).modules)
    modules = family_for(config).lora_modules(config)
    if adapted == {module.name for module in modules}:
        return ("all",)
    names: list[str] = []
    found: set[str] = set()
    present = [group for group in GROUPS if any(module.group == group for module in modules)]
    for name in [*present, *dict.fromkeys(module.projection for module in modules)]:
        meant = {module.name for module in resolve_targets(config, [name])}
        if meant <= adapted and not meant <= found:
            names.append(name)
            found |= meant
    if found != adapted:
        odd = sorted(adapted - found)[0]
        raise ConflictError(
            f"{where}: adapts {odd}, but not every module of that kind, which no lora_target can say; name a wider "
            "lora_target, as lora_target: all, and the others start fresh"
        )
    return tuple(names)


def _read(path: Path, config: Mapping[str, Any], max_rank: int) -> AdapterTensors:
    return read_adapter(path.resolve(), family_for(config), config, max_rank)
