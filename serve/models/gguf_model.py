"""A GGUF file as `--model`: a small directory that stands for it, with everything that SGLang reads except weights.

The directory lies in the user's cache and holds config.json, made from the file's keys; the tokenizer; and an empty
safetensors file, which SGLang asks for. Weights stay where they are: config.json names the model's files, from which
the expert store and SGLang's loader (`sglang_patch/cpu/weights.py`) read. The directory is made anew when a file, or a
tokenizer next to it, has changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from kt_runtime.checkpoint_file import Entry
from kt_runtime.errors import CheckpointError, UnknownNameError
from kt_runtime.families import family_for, gguf
from kt_runtime.files import only_files, write_directory
from kt_runtime.gguf_file import SUFFIX, GgufFile, read_gguf_model
from kt_runtime.serve.models.gguf_tokenizer import tokenizer_files
from kt_runtime.serve.models.hub_cache import user_cache_directory

NO_WEIGHTS = b"\x02\x00\x00\x00\x00\x00\x00\x00{}"
"""A safetensors file without tensors."""
_OURS = only_files(re.compile(r"[\w.-]+"), ["config.json"], "a directory that stands for a GGUF model")


def is_gguf(path: Path) -> bool:
    return path.suffix == SUFFIX and path.is_file()


def gguf_directory(path: Path) -> Path:
    """The directory that stands for the model of `path`, made or found.

    Raises NotFoundError for a missing part of a split model, UnknownNameError for an architecture without a family,
    and CheckpointError for a broken file, a missing tensor, and types that experts are not served in.
    """
    path = path.resolve()
    files = read_gguf_model(path)
    config = _config(files)
    place = _place(files[0].path)
    others = tokenizer_files(files[0])
    contents = {"config.json": json.dumps(config, indent=2).encode(), "model.safetensors": NO_WEIGHTS, **others}
    if not _holds(place, contents):
        write_directory(place, lambda temporary: _fill(temporary, contents), replace=_OURS)
    return place


def check_gguf(config: Mapping[str, Any]) -> None:
    """Compares the files that a directory's config names with the config. Raises as `gguf_directory`."""
    recorded = config["quantization_config"]["files"]
    fresh = _config(read_gguf_model(Path(recorded[0])))
    if json.loads(json.dumps(fresh)) != config:
        raise CheckpointError(
            f"{recorded[0]}: the file has changed since its config was made; start with the file itself"
        )


def _config(files: Sequence[GgufFile]) -> dict[str, Any]:
    where = str(files[0].path)
    tensors = {name: entry for file in files for name, entry in file.tensors.items()}
    shapes = {name: entry.shape for name, entry in tensors.items()}

    def vector(name: str) -> list[float]:
        import torch  # seconds, and few models need it

        from kt_runtime.experts.gguf import GgufTensors

        with GgufTensors([file.path for file in files]) as opened:
            return [float(value) for value in opened.read(name, torch.float32).flatten()]

    try:
        config = gguf.config_of(files[0].keys, shapes, where, vector)
    except UnknownNameError as error:
        raise CheckpointError(str(error)) from None
    family = family_for(config)
    family.check(config)
    paths = {name: file.path for file in files for name in file.tensors}
    dense = _checked_dense(config, tensors, paths, where)
    types = {name: entry.dtype for name, entry in tensors.items()}
    experts = gguf.expert_types(types, family.moe_layers(config), where)
    _check_experts(config, tensors, paths)
    _check_nothing_is_left(config, tensors, dense, paths)
    listed = [str(file.path) for file in files]
    stats = [os.stat(path) for path in listed]
    config["quantization_config"] = {
        "quant_method": "gguf",
        "files": listed,
        "versions": [f"{stat.st_size} bytes, {stat.st_mtime_ns}" for stat in stats],
        "experts": [list(pair) for pair in experts],
        "dense": _kept_dense(config, types),
    }
    return config


def _checked_dense(
    config: Mapping[str, Any], tensors: Mapping[str, Entry], paths: Mapping[str, Path], where: str
) -> set[str]:
    """Names of the tensors that serving reads, but for the experts'. Raises CheckpointError for a missing one, and for
    one of another shape."""
    is_tied = bool(config.get("tie_word_embeddings"))
    known = set(gguf.read_for_config(config))
    for source in family_for(config).twin_sources(config):
        if is_tied and source.name == "lm_head.weight":
            continue
        for way in gguf.alternatives(config, source.name, source.shape):  # some files have kv_b_proj whole and split
            known.update(part.name for part in way.parts)
        for part in gguf.held(config, source.name, source.shape, tensors).parts:
            if part.name not in tensors:
                raise CheckpointError(f"{where}: tensor {part.name!r} is missing")
            if not part.fits(tensors[part.name].shape):
                raise CheckpointError(
                    f"{paths[part.name]}: tensor {part.name!r} has shape {list(tensors[part.name].shape)}, expected "
                    f"{list(part.shape)}"
                )
    return known


def _check_nothing_is_left(
    config: Mapping[str, Any], names: Collection[str], known: Collection[str], paths: Mapping[str, Path]
) -> None:
    """Raises CheckpointError for a tensor that nothing would read, such as a bias that the family has not. Those behind
    the last layer are read past."""
    layers = config["num_hidden_layers"]
    experts = {f"{gguf.expert_prefix(layer)}.{part}" for layer in range(layers) for part in gguf.expert_tensors(config)}
    left = [name for name in names if name not in known and name not in experts and gguf.layer_of(name) < layers]
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise CheckpointError(
            f"{paths[left[0]]}: tensor {left[0][:80]!r}{more}: a model of the family {family_for(config).name} has no "
            "such tensor; without it the answers would be others"
        )


def _kept_dense(config: Mapping[str, Any], types: Mapping[str, str]) -> dict[str, str]:
    """The tensors of linear layers that stay quantized (`families.gguf.packed_tensors`): of layers of the native step's
    table, and of the head, whose tensors all have a type that the kernels multiply."""
    family = family_for(config)
    stack = family.decoder_stack(config)
    if stack is None:
        return {}
    layers = {*stack.linear_layers(), "lm_head.weight"}
    of_layer: dict[str, list[gguf.Held]] = defaultdict(list)
    for source in family.twin_sources(config):
        if source.source in layers and not (source.name == "lm_head.weight" and config.get("tie_word_embeddings")):
            of_layer[source.source].append(gguf.held(config, source.name, source.shape, types))
    kept: dict[str, str] = {}
    for tensors in of_layer.values():
        found = {held.name: types[held.parts[0].name] for held in tensors}
        if all(held.is_matrix_as_it_is for held in tensors) and set(found.values()) <= set(gguf.DENSE_TYPES):
            kept |= found
    return kept


def _check_experts(config: Mapping[str, Any], tensors: Mapping[str, Entry], paths: Mapping[str, Path]) -> None:
    for layer in family_for(config).moe_layers(config):
        for tensor, shape in gguf.expert_tensors(config).items():
            name = f"{gguf.expert_prefix(layer)}.{tensor}"
            if name not in tensors:
                raise CheckpointError(f"{min(paths.values())}: tensor {name!r} is missing: layer {layer} lacks biases")
            if tensors[name].shape != shape:
                raise CheckpointError(
                    f"{paths[name]}: tensor {name!r} has shape {list(tensors[name].shape)}, expected {list(shape)}"
                )


def _place(path: Path) -> Path:
    stem = re.sub(r"[^\w.-]", "_", path.stem)[:80]
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:12]
    return user_cache_directory() / "kt-runtime" / "gguf" / f"{stem}-{digest}"


def _holds(place: Path, contents: Mapping[str, bytes]) -> bool:
    if not place.is_dir() or {entry.name for entry in place.iterdir()} != set(contents):
        return False
    return all((place / name).read_bytes() == content for name, content in contents.items())


def _fill(directory: Path, contents: Mapping[str, bytes]) -> None:
    for name, content in contents.items():
        (directory / name).write_bytes(content)
