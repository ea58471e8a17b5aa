"""`--registry`: checked before the model is loaded, which can take hours."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kt_runtime.errors import ConflictError, InvalidValueError
from kt_runtime.files import TEMPORARY_PREFIX
from kt_runtime.registry import Registry, open_place
from kt_runtime.registry.place import DirectoryPlace
from kt_runtime.serve.options.named import ServeOptions
from kt_runtime.serve.registry.replica import About
from kt_runtime.serve.registry.state import State, StateFile

SHAPE = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
"""What two configs of one model surely agree in. The fingerprint of the weights is compared when they are loaded."""


@dataclass(frozen=True)
class Joining:
    registry: Registry
    file: StateFile
    state: State
    about: About


def joining(
    options: ServeOptions, model: str, config: Mapping[str, Any], adapters: Path, say: Callable[[str], None]
) -> Joining | None:
    """None without `--registry`. `adapters`: the adapter directory, which keeps the replica's name.

    Raises InvalidValueError for a place that can't be a registry, ConflictError for the registry of another model. A
    registry that this server has joined before and that is not there now is a note: the server serves without it.
    """
    if options.registry is None:
        return None
    if options.registry.startswith("memory://"):
        raise InvalidValueError(f"--registry {options.registry}: is memory of one process, which no other server reads")
    file = StateFile(adapters)
    state = file.read(options.port)
    place = open_place(options.registry, state.replica)
    shape = {name: config[name] for name in SHAPE if isinstance(config.get(name), int | str)}
    registry = Registry(place, state.replica)
    try:
        if isinstance(place, DirectoryPlace):
            _check_directory(place.root, is_new=not state.registry)
        base = registry.base()
    except OSError as error:
        if not state.registry and isinstance(place, DirectoryPlace):
            raise InvalidValueError(f"--registry {options.registry}: {error.strerror or error}") from None
        say(f"--registry {options.registry}: does not answer, and is joined when it does: {error.strerror or error}")
        base = None
    if base is not None:
        differ = [
            f"{name} {base.shape[name]} and {shape.get(name)}"
            for name in base.shape
            if base.shape[name] != shape.get(name)
        ]
        if differ:
            raise ConflictError(
                f"--registry {options.registry}: is of another model, {base.model}; there and in {model}: "
                f"{', '.join(differ)}"
            )
    say(f"registry: {options.registry}, as replica {state.replica}")
    return Joining(registry, file, state, About(options.registry, options.url, model, shape))


def _check_directory(root: Path, *, is_new: bool) -> None:
    """Makes the directory itself if it is missing, not its parents. Raises OSError with a message."""
    if is_new and root.parent.is_dir() and not root.exists():
        root.mkdir(exist_ok=True)
    if root.exists() and not root.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "is not a directory")
    first, second = (root / f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}" for _ in range(2))
    try:
        first.touch()
        os.link(first, second)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS) and first.exists():
            raise OSError(error.errno, "its file system has no hard links, which publishing needs") from None
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
    finally:
        for path in (first, second):
            path.unlink(missing_ok=True)
