"""GGUF files for tests: one that our own writer made, with other types, keys or fewer tensors, perhaps split; and a
Hugging Face checkpoint in float32 of the same weights."""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import msgspec
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from kt_runtime.bench.experts.gguf_blocks import to_blocks
from kt_runtime.experts.gguf import from_parts
from kt_runtime.families import family_for
from kt_runtime.families.gguf import DENSE_TYPES, alternatives
from kt_runtime.serve.models.presets import Preset, load_preset

EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
FUSED = re.compile(r"model\.layers\.(\d+)\.\w+\.experts\.(gate_up|down)_proj")
AS_LLAMA_CPP: Mapping[str, Mapping[str, Any]] = {
    "tiny-gpt-oss": {"swiglu_limit": 7.0},
    "tiny-llama4": {
        "attention_chunk_size": 8192,
        "floor_scale": 8192,
        "rope_scaling": {
            "factor": 16.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    },
    "tiny-deepseek-v32": {"index_head_dim": 64},
    "tiny-glm-moe-dsa": {"index_head_dim": 64},
    "tiny-qwen3-next": {"linear_value_head_dim": 32},
    "tiny-qwen3-5-moe-text": {"linear_value_head_dim": 32},
}
"""What llama.cpp can't compute of a preset, and the value that it has."""


def expressible(name: str) -> Preset:
    """The preset as a model that llama.cpp computes too."""
    preset = load_preset(name)
    return msgspec.structs.replace(preset, config={**preset.config, **AS_LLAMA_CPP.get(name, {})})


class Field(NamedTuple):
    types: list[gguf.GGUFValueType]
    value: Any


@functools.lru_cache(maxsize=4)
def _contents(source: Path, *_version: int) -> tuple[dict[str, Field], list[gguf.ReaderTensor]]:
    """Of a file that may be read many times: the package takes longer for its keys than for all else."""
    reader = gguf.GGUFReader(source)
    return {name: Field(field.types, field.contents()) for name, field in reader.fields.items()}, reader.tensors


def requantize(
    source: Path,
    target: Path,
    types: Mapping[str, str],
    *,
    keys: Mapping[str, Any] | None = None,
    leave_out: str = "",
    split: int = 0,
    more: Mapping[str, tuple[int, ...]] | None = None,
    layers_behind: int = 0,
) -> None:
    """`types`: part of a matrix's name → its type. `keys`: other values; a new key is a boolean.

    `split`: tensors in each file. `more`: further tensors, of ones. `layers_behind`: `nextn_predict_layers`.
    """
    stat = source.stat()
    fields, tensors = _contents(source, stat.st_ino, stat.st_size, stat.st_mtime_ns)
    changed = dict(keys or {})
    architecture = changed.pop("general.architecture", fields["general.architecture"].value)
    target.unlink(missing_ok=True)
    writer = gguf.GGUFWriter(target, architecture, split_max_tensors=split)
    for name, field in fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, changed.pop(name, field.value), field.types[0], inner)
    for name, value in changed.items():
        writer.add_bool(name, value)
    if layers_behind:
        writer.add_nextn_predict_layers(layers_behind)
    for tensor in tensors:
        if tensor.name == leave_out:
            continue
        kind = next((kind for part, kind in types.items() if part in tensor.name), tensor.tensor_type.name)
        kind = kind if len(tensor.shape) > 1 else tensor.tensor_type.name  # no vector is ever quantized
        data = np.array(tensor.data)
        if kind != tensor.tensor_type.name:
            data = to_blocks(gguf.quants.dequantize(data, tensor.tensor_type).astype(np.float32), kind)
        writer.add_tensor(tensor.name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    for name, shape in (more or {}).items():
        writer.add_tensor(name, np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def dequantized(checkpoint: Path, path: Path, place: Path) -> Path:
    """Writes `place`: the checkpoint in float32, with the experts and linear layers that the GGUF file stands for."""
    stacked = {
        tensor.name: gguf.quants.dequantize(np.array(tensor.data), tensor.tensor_type).astype(np.float32)
        for tensor in gguf.GGUFReader(path).tensors
        if "_exps." in tensor.name or tensor.tensor_type.name in DENSE_TYPES
    }
    shutil.copytree(checkpoint, place, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((place / "config.json").read_text())
    family = family_for(config)
    tensors = {}
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        tensors[name] = tensor.float().contiguous()
        ours = family.our_name(name)
        if found := EXPERT.fullmatch(ours):
            layer, expert, part = found.groups()
            tensors[name] = torch.from_numpy(stacked[f"blk.{layer}.ffn_{part}_exps.weight"][int(expert)].copy())
        elif found := FUSED.fullmatch(ours):
            tensors[name] = _fused(config, stacked, *found.groups())
        elif ".experts." not in ours:
            held = alternatives(config, ours, tuple(tensor.shape))[0]
            values = [stacked.get(part.name) for part in held.parts]
            if all(value is not None for value in values):
                tensors[name] = from_parts(held, [torch.from_numpy(np.array(value)) for value in values])
    save_file(tensors, place / "model.safetensors", {"format": "pt"})
    return place


def _fused(config: Mapping[str, Any], stacked: Mapping[str, Any], layer: str, projection: str) -> torch.Tensor:
    """The experts of a layer as transformers fuses them."""
    mlp = family_for(config).expert_mlp(config)
    names = ("gate", "up") if projection == "gate_up" else ("down",)
    parts = [torch.from_numpy(stacked[f"blk.{layer}.ffn_{name}_exps.weight"]) for name in names]
    joined = torch.stack(parts, 2).flatten(1, 2) if mlp.is_interleaved and len(parts) > 1 else torch.cat(parts, 1)
    return (joined.transpose(1, 2) if mlp.is_transposed else joined).contiguous()
