"""The models of `bench gpu`: published shapes with random weights, made on the spot, shard by shard."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec

from kt_runtime.errors import InvalidValueError, UserError
from kt_runtime.families import family_for
from kt_runtime.serve.memory.plan import format_bytes
from kt_runtime.serve.models.checkpoint import BF16_BYTES, count_parameters
from kt_runtime.serve.models.make_model import make_model
from kt_runtime.serve.models.presets import Preset, load_preset

DEFAULT = ("qwen3-30b-a3b", "deepseek-v2-lite")
SAID_EVERY = 10
"""Percent between two lines of progress."""


def shape(name: str, layers: int | None) -> Preset:
    """The preset `name` (any case), to be made with random weights; `layers`: fewer than it has, None: all.

    Raises UnknownNameError, and InvalidValueError for more layers than there are, or so few that none has experts.
    """
    found = load_preset(name)
    config = found.config
    if layers is not None:
        most = int(config["num_hidden_layers"])
        if not 1 <= layers <= most:
            raise InvalidValueError(f"--layers is {layers}; {found.name} has {most}")
        config = config | {"num_hidden_layers": layers}
        try:
            family_for(config).moe_layers(config)
        except UserError as error:
            raise InvalidValueError(f"--layers is {layers}, too few for {found.name}: {error}") from None
    return msgspec.structs.replace(found, hub_ids=(), config=config)


def checkpoint_bytes(preset: Preset) -> int:
    return count_parameters(preset.config).total * BF16_BYTES


def check_disk(presets: list[Preset], directory: Path, *, with_gguf: bool) -> None:
    """Raises InvalidValueError if the largest checkpoint does not fit into `directory`; they are made one at a time.
    `with_gguf`: and the same weights once more, for llama.cpp."""
    largest = max(presets, key=checkpoint_bytes)
    needed, free = checkpoint_bytes(largest) * (1 + with_gguf), shutil.disk_usage(directory).free
    if needed > free:
        raise InvalidValueError(
            f"{directory} has {format_bytes(free)} free, the files of {largest.name} need {format_bytes(needed)}; set "
            "TMPDIR to another directory, or take fewer --layers"
        )


def make(preset: Preset, directory: Path, say: Callable[[str], None]) -> Path:
    """Writes the checkpoint, one tensor in memory at a time, and returns its directory."""
    said = 0

    def progress(written: int, total: int) -> None:
        nonlocal said
        percent = 100 * written // total // SAID_EVERY * SAID_EVERY
        if percent > said:
            said = percent
            say(f"{preset.name}: {percent} % of {format_bytes(total)} written")

    return make_model(preset, directory, progress=progress)
