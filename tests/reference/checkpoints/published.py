"""Small checkpoints with the tensor names and the shards of the published ones, from `published.json`.

The file holds, for each preset of the hub: `source`, where names, shapes and files come from; `shards`: the files'
name, the first number, how many are written here, and in which of them single tensors lie (the others follow in the
order of the layers, so that a layer lies in several files); `prefix` of all names, or `inside`, which stands in place
of their `model.`; `shrunk`: the keys of config.json that are smaller here.
A tensor is [type, size, ...]. Sizes are names of what `sizes` computes from config.json. `fp8` and `int4` are the
tensors that a matrix becomes: codes, scales, and for `int4` the shape; `mxfp4` the blocks and scales of fused experts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from reference.checkpoints import mxfp4
from reference.quantized import SCHEMES
from safetensors.torch import save_file

from kt_runtime.families.wrapped import TEXT, is_left_out
from kt_runtime.serve.models.presets import configs

PUBLISHED: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text())
QUANTIZED = {"fp8": "fp8", "int4": "int4_g32"}
LAYERS = {"num_hidden_layers": 0, "first_k_dense_replace": 0, "interleave_moe_layer_step": 1}
TYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


@dataclass(frozen=True)
class Written:
    """`values`: float32 of every tensor that the model has, by the names of `published.json` without prefix.
    `left_out`: names of tensors that it has not, as in the files. `shards`: tensors of each file."""

    directory: Path
    config: dict[str, Any]
    values: dict[str, torch.Tensor]
    left_out: set[str]
    shards: dict[str, list[str]]


def write(preset: str, directory: Path) -> Written:
    layout = PUBLISHED[preset]
    published: dict[str, Any] = json.loads(configs().joinpath("models", f"{preset}.json").read_bytes())["config"]
    inner = {**published.get(TEXT, published), **layout["shrunk"]}
    files: list[list[str]] = [[] for _ in range(layout["shards"]["number"])]
    stored: dict[str, torch.Tensor] = {}
    values: dict[str, torch.Tensor] = {}
    left_out: set[str] = set()
    rows = list(_rows(layout, inner))
    generator = torch.Generator().manual_seed(len(rows))
    for index, (name, kind, shape, is_of_model) in enumerate(rows):
        file = files[_file(layout["shards"], name, index, len(rows))]
        tensors, exact = _drawn(kind, shape, generator)
        prefix = "" if is_left_out(name) else layout.get("prefix", "")
        inside = layout.get("inside") if name.startswith("model.") and not is_left_out(name) else None
        for part, tensor in tensors.items():
            whole_name = name if inside is None else inside + name.removeprefix("model.")
            stored_name = prefix + (whole_name.removesuffix(".weight") if kind in QUANTIZED else whole_name) + part
            stored[stored_name] = tensor
            file.append(stored_name)
            if not is_of_model:
                left_out.add(stored_name)
        if is_of_model:
            values[name] = exact
    shards = {_shard_name(layout["shards"], number): names for number, names in enumerate(files)}
    directory.mkdir()
    for shard, names in shards.items():
        save_file({name: stored[name] for name in names}, directory / shard, {"format": "pt"})
    weight_map = {name: shard for shard, names in shards.items() for name in names}
    index_file = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index_file))
    whole = {**published, TEXT: inner} if TEXT in published else inner
    (directory / "config.json").write_text(json.dumps(whole))
    (directory / "tokenizer.json").write_text("{}")
    return Written(directory, inner, values, left_out, shards)


def _rows(layout: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[tuple[str, str, tuple[int, ...], bool]]:
    """(name, type, shape, whether the model has it), in the order of the layers."""
    known = sizes(config)

    def row(name: str, entry: list[str], is_of_model: bool = True) -> tuple[str, str, tuple[int, ...], bool]:
        return name, entry[0], tuple(known[size] for size in entry[1:]), is_of_model

    layers, first, step = (config.get(key, otherwise) for key, otherwise in LAYERS.items())
    behind = layout.get("behind the last layer", {})
    for name, entry in layout["once"].items():
        yield row(name, entry)
    for layer in range(layers + bool(behind)):
        is_of_model, is_dense = layer < layers, layer < first or (layer + 1) % step > 0
        interval = config.get("full_attention_interval", 1)
        attends = layer % interval == interval - 1
        groups = [layout["every layer"], layout.get("attention layers" if attends else "linear layers", {})]
        groups += [layout.get("dense layers", {}) if is_dense else layout["routed layers"]]
        groups += [] if is_of_model else [behind]
        for name, entry in (item for group in groups for item in group.items()):
            is_computed = name.endswith("inv_freq")
            yield row(f"model.layers.{layer}.{name}", entry, is_of_model and not is_computed)
        for expert in range(0 if is_dense else known["experts"]):
            for name, entry in layout.get("experts", {}).items():
                yield row(f"model.layers.{layer}.{name.format(expert=expert)}", entry, is_of_model)
    for name, entry in layout.get("beside", {}).items():
        yield row(name, entry, False)


def sizes(config: Mapping[str, Any]) -> dict[str, int]:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    experts = next(
        config[key] for key in ("n_routed_experts", "num_local_experts", "num_experts") if config.get(key) is not None
    )
    expert = config.get("moe_intermediate_size") or config["intermediate_size"]
    head = config.get("head_dim") or hidden // heads
    found = {
        "hidden": hidden,
        "two_hidden": 2 * hidden,
        "vocabulary": config["vocab_size"],
        "dense": config.get("intermediate_size", 0),
        "expert": expert,
        "two_expert": 2 * expert,
        "heads": heads,
        "between": config.get("intermediate_size_mlp", 0),
        "experts": experts,
        "shared": config.get("shared_expert_intermediate_size") or expert * (config.get("n_shared_experts") or 0),
        "head": min(head, 8) if "kv_lora_rank" in config else head,
        "queries": heads * head,
        "keys": config["num_key_value_heads"] * head,
        "gated_queries": 2 * heads * head,
        "one": 1,
    }
    if "index_topk" in config:
        found |= {"index_size": config["index_head_dim"], "index_heads": config["index_n_heads"]}
        found["index_queries"] = found["index_size"] * found["index_heads"]
    if "linear_num_key_heads" in config:
        keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
        values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        found |= {
            "delta_heads": config["linear_num_value_heads"],
            "delta_gates": 2 * config["linear_num_value_heads"],
            "delta_value": config["linear_value_head_dim"],
            "delta_values": values,
            "delta_channels": 2 * keys + values,
            "delta_inputs": 2 * keys + 2 * values,
            "taps": config["linear_conv_kernel_dim"],
        }
    if "kv_lora_rank" in config:
        rope, nope, value = config["qk_rope_head_dim"], config["qk_nope_head_dim"], config["v_head_dim"]
        found |= {
            "latent": config["kv_lora_rank"],
            "latent_rope": config["kv_lora_rank"] + rope,
            "half_rope": rope // 2,
            "query_rank": config.get("q_lora_rank") or 0,
            "queries": heads * (nope + rope),
            "nope_values": heads * (nope + value),
            "values": heads * value,
        }
    return found


def _drawn(
    kind: str, shape: tuple[int, ...], generator: torch.Generator
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The stored tensors by the end of their names, and the values that they mean."""
    drawn = (torch.randn(shape, generator=generator) * 0.1).bfloat16()
    if kind in QUANTIZED:
        tensors, exact = SCHEMES[QUANTIZED[kind]].store(drawn)
        return {part: tensor.contiguous() for part, tensor in tensors.items()}, exact.float()
    if kind == "mxfp4":
        blocks, scales, exact = mxfp4.packed(drawn)
        return {"_blocks": blocks.contiguous(), "_scales": scales.contiguous()}, exact
    return {"": drawn.to(TYPES[kind])}, drawn.float()


def _file(shards: Mapping[str, Any], name: str, index: int, rows: int) -> int:
    for part, place in shards["places"].items():
        if part in name:
            return int(place) % int(shards["number"])
    return index * int(shards["number"]) // rows


def _shard_name(shards: Mapping[str, Any], number: int) -> str:
    return str(shards["name"]).format(shards["first"] + number)
