"""Checkpoints that contradict themselves are refused before anything is served, with file, tensor, found, expected."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from reference.checkpoints.published import PUBLISHED, Written, write
from safetensors.torch import load_file, save_file
from torch import Tensor

from kt_runtime.errors import CheckpointError
from kt_runtime.experts import ExpertShape, ExpertStore
from kt_runtime.families import naming
from kt_runtime.serve.models.report import resolve_model
from kt_runtime.sglang_patch.cpu.weights import dense_tensors

Edit = Callable[[dict[str, Tensor], str], None]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def edit(written: Written, change: Edit) -> None:
    """`change(tensors, file)` for each file; then the index lists what the files hold."""
    weight_map: dict[str, str] = {}
    for path in sorted(written.directory.glob("*.safetensors")):
        tensors = load_file(path)
        change(tensors, path.name)
        save_file(tensors, path, {"format": "pt"})
        weight_map |= {name: path.name for name in tensors if name not in weight_map}
    (written.directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def load(directory: Path) -> None:
    """What a server does before it listens: the check, the dense weights, the experts."""
    model = resolve_model(str(directory))
    files = sorted(str(path) for path in model.directory.glob("*.safetensors"))
    for _ in dense_tensors(files, torch.float32, model.config):
        pass
    keys = {layer: model.family.expert_prefix(layer) for layer in model.family.moe_layers(model.config)}
    shape = ExpertShape(*model.family.expert_shape(model.config))
    ExpertStore.load(model.directory, keys, shape, num_threads=1, rename=model.family.our_name).close()


def refusal(written: Written) -> str:
    with pytest.raises(CheckpointError) as refused:
        load(written.directory)
    return str(refused.value)


@pytest.mark.parametrize("preset", PUBLISHED)
def test_an_expert_that_is_missing_in_one_layer_is_named_as_in_the_files(tmp_path: Path, preset: str) -> None:
    written = write(preset, tmp_path / "model")
    fused = r"layers\.2\..*\.experts\.gate_up_proj_blocks$|layers\.3\..*\.experts\.down_proj$"
    pattern = re.compile(rf"layers\.2\..*\.experts\.5\.(w3|up_proj)\.weight(_packed)?$|{fused}")
    dropped: list[str] = []

    def drop(tensors: dict[str, Tensor], file: str) -> None:
        for name in [name for name in tensors if pattern.search(name)]:
            del tensors[name]
            dropped.append(name)

    edit(written, drop)
    told = refusal(written)
    assert len(dropped) == 1 and f"the weights lack {naming.without_wrapper(dropped[0])}" in told


def in_bf16(pattern: str) -> Edit:
    """The matched matrices are plain ones without scales."""

    def change(tensors: dict[str, Tensor], file: str) -> None:
        for name in [name for name in tensors if re.search(pattern, name)]:
            if name.endswith("_scale_inv"):
                del tensors[name]
            elif tensors[name].dtype == torch.float8_e4m3fn:
                tensors[name] = tensors[name].bfloat16()

    return change


def poison(name: str) -> Edit:
    def change(tensors: dict[str, Tensor], file: str) -> None:
        if name in tensors:
            tensors[name].view(-1)[1] = float("nan")

    return change


def add(beside: str, name: str, tensor: Tensor) -> Edit:
    def change(tensors: dict[str, Tensor], file: str) -> None:
        if beside in tensors:
            tensors[name] = tensor.clone()

    return change


def copy_to_the_last_file(name: str) -> Edit:
    seen: list[Tensor] = []

    def change(tensors: dict[str, Tensor], file: str) -> None:
        seen.extend([tensors[name] + 1] if name in tensors else [])
        if file.startswith("model-00004"):
            tensors[name] = seen[0]

    return change


EXPERT = "model.layers.1.mlp.experts.3.up_proj"
CASES: dict[str, tuple[str, Edit, str]] = {
    "one expert is plain": (
        "MiniMax-M2",
        in_bf16(r"layers\.1\..*experts\.3\.w1\."),
        r"model-0000\d-of-00130.safetensors: .*experts.3.gate_proj.weight' has dtype BF16, expected F8_E4M3",
    ),
    "quantized by config.json alone": (
        "MiniMax-M2",
        in_bf16(""),
        r"by config.json the weights are quantized \(fp8, .*\), but all matrices are BF16, F32",
    ),
    "zero points of a symmetric scheme": (
        "Kimi-K2-Thinking",
        add(f"{EXPERT}.weight_scale", f"{EXPERT}.weight_zero_point", torch.zeros(20, 6, dtype=torch.int32)),
        r"of-000062.safetensors: '.*up_proj.weight_zero_point' is there; by config.json .* weight_packed, weight_sc",
    ),
    "a plain matrix beside its codes": (
        "Kimi-K2-Thinking",
        add(f"{EXPERT}.weight_packed", f"{EXPERT}.weight", torch.ones(160, 192).bfloat16()),
        r"'.*up_proj.weight_packed' is there; by config.json the matrix is stored as weight",
    ),
    "scales of another method": (
        "MiniMax-M2",
        add(
            "model.layers.0.self_attn.o_proj.weight", "model.layers.0.self_attn.o_proj.weight_scale", torch.ones(192, 1)
        ),
        r"'model.layers.0.self_attn.o_proj.weight_scale' is there; by config.json .* weight, weight_scale_inv",
    ),
    "NaN in a scale of an expert": (
        "MiniMax-M2",
        poison("model.layers.1.block_sparse_moe.experts.3.w2.weight_scale_inv"),
        r"of-00130.safetensors: .*experts.3.down_proj.weight_scale_inv' holds scale nan .* at element 1",
    ),
    "NaN in a scale of attention": (
        "MiniMax-M2",
        poison("model.layers.1.self_attn.q_proj.weight_scale_inv"),
        r"of-00130.safetensors: 'model.layers.1.self_attn.q_proj.weight_scale_inv' holds NaN or Inf at element 1",
    ),
    "NaN in a norm": (
        "Qwen3-30B-A3B",
        poison("model.layers.1.self_attn.q_norm.weight"),
        r"of-00016.safetensors: 'model.layers.1.self_attn.q_norm.weight' holds NaN or Inf at element 1",
    ),
    "one tensor in two files": (
        "Qwen3-30B-A3B",
        copy_to_the_last_file("model.layers.0.input_layernorm.weight"),
        r"model-00004-of-00016.safetensors: 'model.layers.0.input_layernorm.weight' is in model-00001-of-00016",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_that_contradicts_itself_is_refused(tmp_path: Path, case: str) -> None:
    preset, change, told = CASES[case]
    written = write(preset, tmp_path / "model")
    edit(written, change)
    assert re.search(told, refusal(written))


def test_a_file_of_another_model_among_the_shards_is_refused(tmp_path: Path) -> None:
    written, other = write("Qwen3-30B-A3B", tmp_path / "model"), write("GLM-4.5", tmp_path / "other")
    file = "model-00002-of-00016.safetensors"
    (other.directory / "model-00002-of-00093.safetensors").replace(written.directory / file)
    assert re.search(rf"'.*' is in {file} too; files of two checkpoints are mixed", refusal(written))


def test_layers_that_are_left_plain_are_served(tmp_path: Path) -> None:
    """Publishers leave single layers out of a quantization."""
    written = write("MiniMax-M2", tmp_path / "model")
    edit(written, in_bf16(r"layers\.0\."))
    load(written.directory)
