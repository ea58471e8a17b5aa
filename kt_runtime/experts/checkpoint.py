"""Opens a Hugging Face checkpoint directory for the native loader: open files, and the offsets of their tensors.

The directory holds model.safetensors.index.json with its shards, or one model.safetensors; or its config.json names the
files of a GGUF model (gguf.py). This module reads and checks every header; the loader reads the tensors' bytes. The
quantization_config of config.json is passed on unchanged.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from kt_runtime import _experts
from kt_runtime.checkpoint_file import Entry, open_tensors, read_json
from kt_runtime.errors import CheckpointError, NotFoundError
from kt_runtime.experts.gguf import gguf_files, open_gguf_checkpoint
from kt_runtime.experts.native import translated_errors

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CONFIG = "config.json"


def open_checkpoint(directory: Path, rename: Callable[[str], str] | None = None) -> _experts.Checkpoint:
    """Opens every file and checks its header. Raises NotFoundError and CheckpointError, which name the file.

    `rename`: the name by which the loader knows a tensor of the files; None: its own.
    """
    quantization = _quantization(directory)
    if files := gguf_files(quantization):
        return open_gguf_checkpoint(directory, files)
    shards = _shards(directory)
    checkpoint = _experts.Checkpoint(str(directory), quantization)
    for shard, names in shards.items():
        _add_file(checkpoint, directory / shard, names, rename)
    return checkpoint


def _shards(directory: Path) -> dict[str, Collection[str] | None]:
    """File name → the names of its tensors according to the index; None without an index: all tensors of the file."""
    index = _read_if_there(directory / INDEX)
    if index is None:
        if not os.path.lexists(directory / SINGLE):
            raise NotFoundError(f"{directory}: neither {INDEX} nor {SINGLE} is in this directory")
        return {SINGLE: None}
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{directory / INDEX}: has no weight_map object")
    shards: dict[str, Collection[str] | None] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or shard in ("", ".", "..") or "/" in shard or "\0" in shard:
            raise CheckpointError(
                f"{directory / INDEX}: shard of {name[:80]!r} is {str(shard)[:80]!r}, not a file name in this directory"
            )
        names = shards.setdefault(shard, [])
        assert isinstance(names, list)
        names.append(name)
    return shards


def _add_file(
    checkpoint: _experts.Checkpoint,
    path: Path,
    names: Collection[str] | None,
    rename: Callable[[str], str] | None,
) -> None:
    with translated_errors(), open_tensors(path) as (descriptor, entries):
        chosen = entries if names is None else _chosen(entries, names, path)
        if rename is not None:
            chosen = {rename(name): entry for name, entry in chosen.items()}
        checkpoint.add_file(str(path), descriptor, chosen)


def _chosen(entries: dict[str, Entry], names: Collection[str], path: Path) -> dict[str, Entry]:
    missing = next((name for name in names if name not in entries), None)
    if missing is not None:
        raise CheckpointError(f"{path}: tensor {missing[:80]!r} is missing, though the index places it here")
    return {name: entries[name] for name in names}


def _quantization(directory: Path) -> dict[str, Any] | None:
    """quantization_config of config.json, else that of its text_config; None if there is neither."""
    config = _read_if_there(directory / CONFIG)
    if not isinstance(config, dict):
        return None
    for holder in (config, config.get("text_config")):
        found = holder.get("quantization_config") if isinstance(holder, dict) else None
        if isinstance(found, dict):
            return found
    return None


def _read_if_there(path: Path) -> Any:
    try:
        return read_json(path)
    except NotFoundError:
        return None
