"""Presets: the names that `--model` knows, one JSON file each in `configs/models/`.

A file holds `description`, `hub_ids` (Hugging Face repositories to search in the local cache, the first found is used;
empty for presets that `kt-runtime models make` writes), an optional `note` for people, `tool_call_parser` and
`reasoning_parser` (SGLang's names, omitted if the model needs none), and `config`: the content of the checkpoint's
config.json. Of a model that reads images too, `Preset.config` is the language model's (`families/wrapped.py`).
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

import msgspec

from kt_runtime.errors import UnknownNameError
from kt_runtime.families.wrapped import text_config


class _PresetFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    description: str
    hub_ids: tuple[str, ...]
    config: dict[str, Any]
    note: str | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None


class Preset(msgspec.Struct, frozen=True):
    """`is_made`: `kt-runtime models make` writes the checkpoint, with random weights; the hub does not have it."""

    name: str
    description: str
    hub_ids: tuple[str, ...]
    config: dict[str, Any]
    note: str | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None

    @property
    def is_made(self) -> bool:
        return not self.hub_ids


def configs() -> Traversable:
    """The package data of `configs/`."""
    return files("kt_runtime").joinpath("configs")


@cache
def preset_names() -> tuple[str, ...]:
    entries = configs().joinpath("models").iterdir()
    return tuple(sorted(entry.name.removesuffix(".json") for entry in entries if entry.name.endswith(".json")))


def is_preset(name: str) -> bool:
    return name.casefold() in {known.casefold() for known in preset_names()}


def load_preset(name: str) -> Preset:
    """The preset called `name`, case-insensitive. Raises UnknownNameError listing the known names."""
    by_folded_name = {known.casefold(): known for known in preset_names()}
    if name.casefold() not in by_folded_name:
        raise UnknownNameError("preset", name, preset_names())
    known = by_folded_name[name.casefold()]
    data = configs().joinpath("models", f"{known}.json").read_bytes()
    parsed = msgspec.json.decode(data, type=_PresetFile)
    fields = msgspec.structs.asdict(parsed)
    return Preset(**{**fields, "name": known, "config": text_config(parsed.config)})
