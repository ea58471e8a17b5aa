"""What `save_pretrained` of transformers 5 writes passes the check and is loaded, for every family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from reference.cases import choose
from reference.checkpoints.transformers_checkpoint import save
from reference.families import PRESETS
from safetensors.torch import load_file, save_file

from kt_runtime.checkpoint_file import read_header
from kt_runtime.errors import CheckpointError
from kt_runtime.experts import ExpertShape, ExpertStore
from kt_runtime.families import FAMILIES, family_for
from kt_runtime.serve.console.start_lines import describe_model
from kt_runtime.serve.memory.plan import MemoryPlan
from kt_runtime.serve.models.checkpoint_files import check_checkpoint, checked_checkpoint
from kt_runtime.serve.models.presets import Preset
from kt_runtime.serve.models.report import resolve_model
from kt_runtime.serve.options.named import ServeOptions

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@pytest.fixture(params=choose(few=["deepseek_v3", "gpt_oss"], usual=list(PRESETS), every=list(PRESETS)))
def preset(request: pytest.FixtureRequest) -> Preset:
    return PRESETS[request.param]


def test_every_family_is_built_by_transformers_here() -> None:
    assert set(PRESETS) == {family.name for family in FAMILIES}


def store(directory: Path) -> ExpertStore:
    config = json.loads((directory / "config.json").read_text())
    family = family_for(config)
    keys = {layer: family.expert_prefix(layer) for layer in family.moe_layers(config)}
    shape = ExpertShape(*family.expert_shape(config))
    mlp = family.expert_mlp(config)
    return ExpertStore.load(directory, keys, shape, num_threads=1, rename=family.our_name, mlp=mlp)


def fingerprint(directory: Path) -> str:
    loaded = store(directory)
    assert loaded.format == "bf16"
    try:
        return loaded.fingerprint()
    finally:
        loaded.close()


def names(directory: Path) -> set[str]:
    return {name for path in directory.glob("*.safetensors") for name in read_header(path)}


# How it was written: dtype, and what `save` takes.
WRITTEN: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16": ("BF16", {}),
    "bf16, fused": ("BF16", {"fused": True}),
    "float16, fused": ("F16", {"fused": True}),
    "float16, shards": ("F16", {"shard_bytes": 300_000}),
    "float32": ("F32", {}),
    "float32, fused, shards": ("F32", {"fused": True, "shard_bytes": 300_000}),
}


def test_every_layout_and_type_is_the_same_model(tmp_path: Path, preset: Preset) -> None:
    found = {}
    for name, (dtype, settings) in WRITTEN.items():
        directory = save(preset, tmp_path / name, DTYPES[dtype], **settings)
        is_fused = any(tensor.endswith("experts.gate_up_proj") for tensor in names(directory))
        assert is_fused == (bool(settings.get("fused")) or family_for(preset.config).fuses_experts)
        assert (directory / "model.safetensors.index.json").is_file() == ("shard_bytes" in settings)
        _, types = checked_checkpoint(directory)
        assert types is not None and (types.dense, types.experts) == ({dtype}, {dtype})
        found[name] = fingerprint(directory)
    assert set(found.values()) == {found["bf16"]}


def test_values_between_those_of_bfloat16_are_rounded_to_the_nearest(tmp_path: Path) -> None:
    preset = PRESETS["qwen3_moe"]
    wide = save(preset, tmp_path / "wide", torch.float32, fused=True, on_grid=False)
    narrow = save(preset, tmp_path / "narrow", torch.bfloat16, on_grid=False)
    half = save(preset, tmp_path / "half", torch.float16, on_grid=False)
    assert fingerprint(wide) == fingerprint(narrow)
    tensors = load_file(half / "model.safetensors")
    rounded = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    (tmp_path / "rounded").mkdir()
    save_file(rounded, tmp_path / "rounded" / "model.safetensors", {"format": "pt"})
    (tmp_path / "rounded" / "config.json").write_bytes((half / "config.json").read_bytes())
    assert fingerprint(half) == fingerprint(tmp_path / "rounded") != fingerprint(narrow)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3.4e38])
def test_a_value_that_bfloat16_has_not_is_refused_with_its_place(tmp_path: Path, value: float) -> None:
    directory = save(PRESETS["qwen3_moe"], tmp_path / "m", torch.float32, fused=True)
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.1.mlp.experts.down_proj"][2, 5, 7] = value
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    place = (2 * 128 + 5) * 64 + 7
    with pytest.raises(CheckpointError, match=rf"experts.down_proj' holds NaN, Inf or a value .*at element {place}"):
        store(directory)


def test_an_expert_that_is_missing_or_of_another_shape_is_refused_by_the_name_in_the_file(tmp_path: Path) -> None:
    directory = save(PRESETS["mixtral"], tmp_path / "m", torch.float32)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.2.block_sparse_moe.experts.5.w3.weight"
    whole = tensors.pop(name)
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"the weights lack {name}"):
        check_checkpoint(directory)
    save_file(tensors | {name: whole[:-1].clone()}, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"'{name}' has shape \[63, 128\], but by config.json \[64, 128\]"):
        check_checkpoint(directory)
    twice = {name: whole, "model.layers.2.mlp.experts.5.up_proj.weight": whole.clone()}
    save_file(tensors | twice, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"are one tensor of the model"):
        check_checkpoint(directory)


def test_half_of_a_layer_s_fused_experts_is_refused(tmp_path: Path) -> None:
    directory = save(PRESETS["olmoe"], tmp_path / "m", torch.bfloat16, fused=True)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.experts.down_proj"]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"the weights lack model.layers.1.mlp.experts.down_proj"):
        check_checkpoint(directory)


def lines(directory: Path, **options: Any) -> str:
    model = resolve_model(directory)
    return "\n".join(describe_model(ServeOptions(model=str(directory), **options), model, MemoryPlan("m", ()), {}))


@pytest.mark.slow
def test_the_log_says_what_becomes_of_the_weights(tmp_path: Path) -> None:
    wide = save(PRESETS["olmoe"], tmp_path / "wide", torch.float32)
    line = "weights: attention and dense weights are converted from float32 to bfloat16; routed experts are rounded "
    assert line + "from float32 to bfloat16\n" in lines(wide)
    assert line + "from float32 to bfloat16 and quantized to int8\n" in lines(wide, expert_format="int8")
    assert "weights: attention and dense weights stay float32; routed experts are rounded" in lines(
        wide, dtype="float32"
    )
    half = save(PRESETS["olmoe"], tmp_path / "half", torch.float16)
    assert "dense weights are converted from float16 to bfloat16; routed experts are rounded from float16" in lines(
        half
    )
    assert "weights:" not in lines(save(PRESETS["olmoe"], tmp_path / "plain", torch.bfloat16))
