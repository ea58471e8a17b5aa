"""Resolves `--model`: a preset, a directory, a GGUF file, or an entry of the Hugging Face cache.

Nothing is downloaded.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kt_runtime.errors import CheckpointError, NotFoundError
from kt_runtime.families.base import Family
from kt_runtime.families.registry import family_for
from kt_runtime.serve.models.checkpoint_files import PlainTypes, checked_checkpoint
from kt_runtime.serve.models.gguf_model import gguf_directory, is_gguf
from kt_runtime.serve.models.hub_cache import find_snapshot, is_hub_id, repository_directory, user_cache_directory
from kt_runtime.serve.models.names import advice, download
from kt_runtime.serve.models.presets import Preset, is_preset, load_preset
from kt_runtime.serve.models.text_model import text_directory

MODELS_VARIABLE = "KT_RUNTIME_MODELS"


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A validated checkpoint. `name`: its name at the server. `config`: the content of config.json. `types`: of its
    weights; None: not read."""

    name: str
    directory: Path
    config: dict[str, Any]
    family: Family
    preset: Preset | None
    types: PlainTypes | None = None


def models_directory() -> Path:
    """The default output of `kt-runtime models make`: KT_RUNTIME_MODELS, or a directory in the user's cache."""
    if explicit := os.environ.get(MODELS_VARIABLE):
        return Path(explicit).expanduser()
    return user_cache_directory() / "kt-runtime" / "models"


def resolve_model(name_or_path: str | Path) -> ResolvedModel:
    """Finds and checks a model. A preset overrides a directory of the same name: write `./NAME` for the directory.

    Raises NotFoundError listing every place searched, and the errors of `checked_checkpoint` for a broken checkpoint.
    """
    text = str(name_or_path)
    preset = load_preset(text) if is_preset(text) else None
    directory, places = locate(text, preset)
    if directory is None:
        raise NotFoundError(not_found_message(text, preset, places))
    try:
        config, types = checked_checkpoint(directory)
    except CheckpointError as error:
        if preset is not None and preset.note:
            raise CheckpointError(f"{error}. Of {preset.name}: {preset.note}") from error
        raise
    return ResolvedModel(_name(text, directory, preset), directory, config, family_for(config), preset, types)


def _name(text: str, directory: Path, preset: Preset | None) -> str:
    if preset is not None:
        return preset.name
    if is_gguf(Path(text).expanduser()):
        return Path(text).stem
    given = Path(text).expanduser()
    if given.is_dir():
        return given.resolve().name
    return text if is_hub_id(text) else directory.name


def find_preset(preset: Preset) -> Path | None:
    """The directory of a preset's checkpoint on this machine, unchecked; None if there is none."""
    return locate(preset.name, preset)[0]


def locate(text: str, preset: Preset | None) -> tuple[Path | None, list[str]]:
    """(directory or None, the places searched)."""
    places = []
    if preset is not None:
        candidate = models_directory() / preset.name
        places.append(str(candidate))
        if candidate.is_dir():
            return text_directory(candidate), places
    else:
        candidate = Path(text).expanduser()
        places.append(str(candidate.absolute()))
        if is_gguf(candidate):
            return gguf_directory(candidate), places
        if candidate.is_file():
            raise CheckpointError(
                f"{candidate}: is a file; a model is a directory with config.json and safetensors files, or a "
                "GGUF file with the suffix .gguf"
            )
        if candidate.is_dir():
            return text_directory(candidate.resolve()), places
    hub_ids = preset.hub_ids if preset is not None else (text,) if is_hub_id(text) else ()
    for hub_id in hub_ids:
        places.append(str(repository_directory(hub_id)))
        if (snapshot := find_snapshot(hub_id)) is not None:
            return text_directory(snapshot), places
    return None, places


def not_found_message(text: str, preset: Preset | None, places: list[str]) -> str:
    message = f"model {text!r} is not on this machine; looked at: {'; '.join(places)}"
    if preset is not None and preset.is_made:
        return f"{message}. Make it with `kt-runtime models make {preset.name}`"
    if preset is not None:
        return f"{message}. {download(preset.hub_ids[0], preset.name)}, or give the checkpoint's directory"
    return f"{message}. {advice(text)}"
