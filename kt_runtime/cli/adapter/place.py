"""Resolves the adapter and base model of a command: names of a running server, directories, files."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kt_runtime.adapters import AdapterTensors, open_directory, read_adapter
from kt_runtime.adapters.paths import NAME_PATTERN
from kt_runtime.adapters.peft_config import MAX_CONFIG_BYTES
from kt_runtime.adapters.peft_directory import CONFIG_FILE
from kt_runtime.cli.connection import ServerAPI
from kt_runtime.errors import (
    AdapterError,
    InvalidValueError,
    NotFoundError,
    ServerUnreachableError,
    UnknownNameError,
)
from kt_runtime.families import Family, family_for
from kt_runtime.serve.models.checkpoint_files import read_config
from kt_runtime.serve.models.presets import is_preset, load_preset
from kt_runtime.serve.models.report import locate, not_found_message

MAX_RANK = 1024
"""The largest rank accepted when no server limits the rank."""

WRITING_SECONDS = 20.0


@dataclass(frozen=True)
class ChosenAdapter:
    """An adapter, checked against the config of its base. `described`: a description for people."""

    adapter: AdapterTensors
    base: Path
    base_name: str
    config: dict[str, Any]
    described: str

    @property
    def family(self) -> Family:
        return family_for(self.config)


def choose_adapter(source: str, version: str | None, base: str | None, api: Callable[[], ServerAPI]) -> ChosenAdapter:
    """`source`: a PEFT directory, a .gguf file, or a name served by `api`, for which `version` selects the version.

    `base`: as `--model` of serve; None: the server's model for a name, else the base named in the adapter's config.
    """
    path = Path(source).expanduser()
    is_name = NAME_PATTERN.fullmatch(source) is not None and not path.exists()
    if not is_name and version is not None:
        raise InvalidValueError(f"--version {version}: {source} is a path, and only served names have versions")
    if is_name:
        path, status, described = _served(source, version, api())
        directory = find_model(base) if base else Path(status["model_directory"])
        name = base or status["model"]
    else:
        if not path.exists():
            raise NotFoundError(f"{source}: no such adapter; a PEFT directory, a .gguf file, or a name that is served")
        name = base or _named_base(path)
        directory, described = find_model(name), str(path)
    config = read_config(directory)
    adapter = read_adapter(path, family_for(config), config, MAX_RANK, name)
    return ChosenAdapter(adapter, directory, name, config, described)


def find_model(name: str) -> Path:
    """The directory of a preset, a path or an entry of the Hugging Face cache. Raises NotFoundError."""
    preset = load_preset(name) if is_preset(name) else None
    directory, places = locate(name, preset)
    if directory is None:
        raise NotFoundError(not_found_message(name, preset, places))
    return directory


def _served(name: str, version: str | None, api: ServerAPI) -> tuple[Path, dict[str, Any], str]:
    """(directory of the version, the server's status, description for people)."""
    try:
        shown, status = api.get(f"/kt/adapters/{name}"), api.get("/kt/status")
    except ServerUnreachableError as error:
        raise NotFoundError(f"{name!r} is no adapter's path here, and as a name it needs a server: {error}") from None
    hashes = [entry["version"] for entry in shown["versions"]]
    wanted = version if version is not None else shown["current"]
    found = [item for item in hashes if wanted and item.startswith(wanted)]
    if len(found) != 1:
        raise UnknownNameError("version", str(wanted), [item[:16] for item in hashes], f"adapter {name!r}")
    path = Path(status["adapter_directory"]) / name / found[0]
    entry = next(entry for entry in shown["versions"] if entry["version"] == found[0])
    wait_until_written(path, name, entry.get("not_stored"))
    return path, status, f"{name}, version {found[0][:16]}"


def wait_until_written(path: Path, name: str, not_stored: str | None = None) -> None:
    """Waits for the directory `path` of a version, which is served shortly before it is written. Raises NotFoundError;
    the message includes `not_stored`, the server's reason for a failed write."""
    deadline = time.monotonic() + WRITING_SECONDS
    while not path.is_dir():
        if time.monotonic() > deadline:
            why = (
                f"the server could not write it: {not_stored}"
                if not_stored
                else "a name is exported where its server runs"
            )
            raise NotFoundError(f"adapter {name!r}: {path} is not on this machine; {why}")
        time.sleep(0.1)


def _named_base(path: Path) -> str:
    """`base_model_name_or_path` of a PEFT directory. Raises InvalidValueError if it is missing."""
    hint = (
        "name the model that it belongs to with --base (a preset, a directory, or an entry of the Hugging Face cache)"
    )
    if not path.is_dir():
        raise InvalidValueError(f"{path}: a file does not name its base; {hint}")
    with open_directory(path) as opened:
        data = opened.read(CONFIG_FILE, MAX_CONFIG_BYTES)
    try:
        named = json.loads(bytes(data)).get("base_model_name_or_path")
    except (ValueError, AttributeError, RecursionError) as error:
        raise AdapterError(f"{path / CONFIG_FILE}: invalid JSON: {error}") from None
    if not isinstance(named, str) or not named:
        raise InvalidValueError(f"{path / CONFIG_FILE}: no base_model_name_or_path; {hint}")
    try:
        find_model(named)
    except NotFoundError as error:
        raise NotFoundError(f"{path / CONFIG_FILE}: base_model_name_or_path: {error}; {hint}") from None
    return named
