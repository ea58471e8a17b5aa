"""GGUF files for tests: one that our own writer made, with other types, keys or fewer tensors, perhaps split; and a
Hugging Face checkpoint in float32 of the same weights."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from kt_runtime.bench.experts.gguf_blocks import to_blocks
from kt_runtime.families import family_for
from kt_runtime.families.gguf import DENSE_TYPES, gguf_name, interleaved_heads

EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")


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
    reader = gguf.GGUFReader(source)
    changed = dict(keys or {})
    architecture = changed.pop("general.architecture", reader.fields["general.architecture"].contents())
    target.unlink(missing_ok=True)
    writer = gguf.GGUFWriter(target, architecture, split_max_tensors=split)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, changed.pop(name, field.contents()), field.types[0], inner)
    for name, value in changed.items():
        writer.add_bool(name, value)
    if layers_behind:
        writer.add_nextn_predict_layers(layers_behind)
    for tensor in reader.tensors:
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
        if found := EXPERT.fullmatch(family.our_name(name)):
            layer, expert, part = found.groups()
            tensors[name] = torch.from_numpy(stacked[f"blk.{layer}.ffn_{part}_exps.weight"][int(expert)].copy())
            continue
        ours = family.our_name(name)
        if (values := stacked.get(gguf_name(config, ours))) is not None:
            heads, (rows, columns) = interleaved_heads(config, ours), values.shape
            if heads:
                values = values.reshape(heads, -1, 2, columns).transpose(0, 2, 1, 3).reshape(rows, columns)
            tensors[name] = torch.from_numpy(values.copy())
    save_file(tensors, place / "model.safetensors", {"format": "pt"})
    return place
