"""Fused tensors in every layout of a family's table hold the same experts as tensors per expert."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from reference import moe
from reference.checkpoints import mxfp4
from reference.expert_problems import per_expert_tensors, present
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from kt_runtime.bench.experts.checkpoint import to_fp8_blocks
from kt_runtime.bench.experts.gguf_blocks import to_blocks
from kt_runtime.errors import CheckpointError
from kt_runtime.experts import ExpertLayer, ExpertShape, ExpertStore
from kt_runtime.families import family_for
from kt_runtime.families.stack import ExpertMlp

EXPERTS = 3
BIASED = ExpertMlp("swigluoai", 7.0, 1.702, has_bias=True)
GPT_OSS = replace(BIASED, is_interleaved=True, is_transposed=True)
RELU = ExpertMlp("relu2", has_bias=True)
LAYOUTS = {
    "concatenated": BIASED,
    "interleaved": replace(BIASED, is_interleaved=True),
    "transposed": replace(BIASED, is_transposed=True),  # Llama 4, which has no biases
    "interleaved and transposed": GPT_OSS,
}


def drawn(hidden: int, inner: int, mlp: ExpertMlp = BIASED) -> moe.ReferenceExperts:
    generator = torch.Generator().manual_seed(4)
    biases = [torch.randn(EXPERTS, n, generator=generator).bfloat16() for n in (inner, inner, hidden)]
    return replace(moe.random_experts(EXPERTS, hidden, inner), biases=(biases[0], biases[1], biases[2]), mlp=mlp)


def joined(gate: Tensor, up: Tensor, mlp: ExpertMlp) -> Tensor:
    """Of [E, I, ...] matrices or biases."""
    if not mlp.has_gate:
        return up
    return torch.stack([gate, up], 2).flatten(1, 2) if mlp.is_interleaved else torch.cat([gate, up], 1)


def fused(experts: moe.ReferenceExperts, mlp: ExpertMlp) -> dict[str, Tensor]:
    gate_up, down = joined(experts.gate, experts.up, mlp), experts.down
    if mlp.is_transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    gate_bias, up_bias, down_bias = present(experts.biases)
    name = "m.gate_up_proj" if mlp.has_gate else "m.up_proj"
    return {
        name: gate_up.contiguous(),
        f"{name}_bias": joined(gate_bias, up_bias, mlp),
        "m.down_proj": down.contiguous(),
        "m.down_proj_bias": down_bias,
    }


def load(
    directory: Path, tensors: dict[str, Tensor], mlp: ExpertMlp, hidden: int, inner: int, **options: Any
) -> ExpertLayer:
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    shape = ExpertShape(EXPERTS, hidden, inner)
    return ExpertStore.load(directory, {0: "m"}, shape, num_threads=2, mlp=mlp, **options).layers[0]


def out_of(layer: ExpertLayer) -> Tensor:
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(7, layer.shape.hidden, generator=generator)
    ids = torch.randint(0, EXPERTS, (7, 2), generator=generator)
    return layer.forward(x, ids, torch.rand(7, 2, generator=generator))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [(40, 56), (96, 96)], ids=["rectangular", "square"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_fused_tensors_hold_what_tensors_per_expert_do(
    layout: str, size: tuple[int, int], dtype: torch.dtype, num_nodes: int, tmp_path: Path
) -> None:
    """Square matrices show that the layout comes from the table, not from shapes."""
    mlp, experts = LAYOUTS[layout], drawn(*size)
    tensors = {name: tensor.to(dtype) for name, tensor in fused(experts, mlp).items()}
    layer = load(tmp_path / "fused", tensors, mlp, *size, num_nodes=num_nodes)
    for expert in range(EXPERTS):
        for got, wanted in zip(layer.unpacked(expert), (experts.gate, experts.up, experts.down), strict=True):
            assert torch.equal(got, wanted[expert])
    single = load(tmp_path / "single", per_expert_tensors(experts, "m"), mlp, *size)
    assert torch.equal(out_of(layer), out_of(single))


def test_experts_without_a_gate_have_up_alone_fused_or_not(tmp_path: Path) -> None:
    experts = drawn(40, 56, RELU)
    layers = [
        load(tmp_path / "fused", fused(experts, RELU), RELU, 40, 56),
        load(tmp_path / "single", per_expert_tensors(experts, "m"), RELU, 40, 56),
        load(tmp_path / "turned", fused(experts, turned := replace(RELU, is_transposed=True)), turned, 40, 56),
    ]
    for layer in layers:
        gate, up, down = layer.unpacked(2)
        assert gate.numel() == 0 and torch.equal(up, experts.up[2]) and torch.equal(down, experts.down[2])
        assert torch.equal(out_of(layer), out_of(layers[0]))
    matrices, biases = 2 * 40 * 56 * 2, (40 + 56) * 4
    assert layers[0].native().weight_bytes == EXPERTS * (matrices + biases)
    w13, w2 = (torch.empty(EXPERTS, *sizes, dtype=torch.bfloat16) for sizes in ((56, 40), (40, 56)))
    layers[0].unpack_range(0, EXPERTS, w13, w2)
    assert torch.equal(w13, experts.up) and torch.equal(w2, experts.down)


def mxfp4_tensors(experts: moe.ReferenceExperts) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """gpt-oss's tensors, and what they mean: rows are [out, in], gate's and up's in turn."""
    tensors, exact = {}, {}
    for name, matrix in (("m.gate_up_proj", joined(experts.gate, experts.up, GPT_OSS)), ("m.down_proj", experts.down)):
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"], exact[name] = mxfp4.packed(matrix)
    gate_bias, up_bias, down_bias = present(experts.biases)
    biases = {"m.gate_up_proj_bias": joined(gate_bias, up_bias, GPT_OSS), "m.down_proj_bias": down_bias}
    return {name: tensor.contiguous() for name, tensor in (tensors | biases).items()}, exact


def mxfp4_directory(directory: Path) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"quantization_config": mxfp4.CONFIG}))
    return directory


@pytest.mark.parametrize("size", [(64, 96), (160, 160)], ids=["rectangular", "square"])
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_mxfp4_experts_are_what_transformers_dequantizes(size: tuple[int, int], num_nodes: int, tmp_path: Path) -> None:
    experts = drawn(*size, GPT_OSS)
    tensors, exact = mxfp4_tensors(experts)
    layer = load(mxfp4_directory(tmp_path / "mxfp4"), tensors, GPT_OSS, *size, num_nodes=num_nodes)
    assert layer.native().format == "mxfp4_g32"
    for name, values in exact.items():
        theirs = convert_moe_packed_tensors(tensors[f"{name}_blocks"], tensors[f"{name}_scales"])
        assert torch.equal(theirs.mT.float(), values)
    for expert in range(EXPERTS):
        gate, up, down = layer.unpacked(expert)
        both = exact["m.gate_up_proj"][expert]
        assert torch.equal(gate, both[0::2]) and torch.equal(up, both[1::2])
        assert torch.equal(down, exact["m.down_proj"][expert])
    meant = replace(
        experts,
        gate=exact["m.gate_up_proj"][:, 0::2].bfloat16(),
        up=exact["m.gate_up_proj"][:, 1::2].bfloat16(),
        down=exact["m.down_proj"].bfloat16(),
    )
    plain = load(tmp_path / "plain", fused(meant, GPT_OSS), GPT_OSS, *size)
    assert torch.equal(out_of(layer), out_of(plain))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("scale", r"_scales' holds a scale that is NaN at element"),
        ("shape", r"down_proj_blocks' has shape \[3, 64, 3, 8\], expected \[3, 64, 3, 16\]"),
        ("dtype", r"gate_up_proj_scales' has dtype I8, expected U8"),
        ("missing", r"gate_up_proj_bias"),
        ("method", r"quant_method is 'fp8', but experts under 'm' need 'mxfp4'"),
    ],
)
def test_mxfp4_that_does_not_fit_is_refused_by_name(change: str, message: str, tmp_path: Path) -> None:
    tensors, _ = mxfp4_tensors(drawn(64, 96, GPT_OSS))
    directory = mxfp4_directory(tmp_path / "m")
    if change == "scale":
        tensors["m.gate_up_proj_scales"][1, 5, 1] = 255
    elif change == "shape":
        tensors["m.down_proj_blocks"] = tensors["m.down_proj_blocks"][..., :8].contiguous()
    elif change == "dtype":
        tensors["m.gate_up_proj_scales"] = tensors["m.gate_up_proj_scales"].view(torch.int8)
    elif change == "missing":
        del tensors["m.gate_up_proj_bias"]
    else:
        (directory / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(CheckpointError, match=message):
        load(directory, tensors, GPT_OSS, 64, 96)


def test_interleaved_fp8_has_the_scales_of_the_stored_rows(tmp_path: Path) -> None:
    """Blocks of 128 stored rows are 64 rows of gate and 64 of up."""
    hidden, inner = 160, 208
    mlp = ExpertMlp(is_interleaved=True)
    experts = moe.random_experts(EXPERTS, hidden, inner)
    experts = replace(experts, up=experts.up * torch.linspace(1, 4, inner).bfloat16()[:, None])
    quantized = [to_fp8_blocks(matrix) for matrix in joined(experts.gate, experts.up, mlp)]
    downs = [to_fp8_blocks(matrix) for matrix in experts.down]
    tensors = {}
    for name, made in (("m.gate_up_proj", quantized), ("m.down_proj", downs)):
        tensors[name] = torch.stack([codes for codes, _ in made])
        tensors[f"{name}_scale_inv"] = torch.stack([scales for _, scales in made])
    layer = load(tmp_path, tensors, mlp, hidden, inner)
    for expert, (codes, scales) in enumerate(quantized):
        every = scales.repeat_interleave(128, 0)[: 2 * inner].repeat_interleave(128, 1)[:, :hidden]
        exact = codes.float() * every
        gate, up, _ = layer.unpacked(expert)
        assert torch.equal(gate, exact[::2]) and torch.equal(up, exact[1::2])


def test_short_names_of_projections_are_renamed_with_their_biases(tmp_path: Path) -> None:
    """Mixtral's w1, w3, w2, by its family's table."""
    experts = drawn(40, 56)
    short = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    tensors = per_expert_tensors(experts, "model.layers.0.block_sparse_moe.experts")
    renamed = {}
    for name, tensor in tensors.items():
        projection = name.split(".")[-2]
        renamed[name.replace(projection, short[projection])] = tensor
    save_file(renamed, tmp_path / "model.safetensors")
    family = family_for({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"})
    keys, shape = {0: family.expert_prefix(0)}, ExpertShape(EXPERTS, 40, 56)
    layer = ExpertStore.load(tmp_path, keys, shape, rename=family.our_name, mlp=BIASED).layers[0]
    single = load(tmp_path / "single", per_expert_tensors(experts, "m"), BIASED, 40, 56)
    assert torch.equal(out_of(layer), out_of(single))


@pytest.mark.parametrize("mlp", [BIASED, RELU], ids=["biases", "no gate"])
def test_a_gguf_file_may_have_biases_and_no_gate(mlp: ExpertMlp, tmp_path: Path) -> None:
    experts = drawn(64, 96, mlp)
    parts = {"gate": experts.gate, "up": experts.up, "down": experts.down}
    tensors: dict[str, tuple[np.ndarray, str]] = {}
    for (part, matrices), bias in zip(parts.items(), present(experts.biases), strict=True):
        if part == "gate" and not mlp.has_gate:
            continue
        tensors[f"blk.0.ffn_{part}_exps.weight"] = (to_blocks(matrices.float().numpy(), "BF16"), "BF16")
        tensors[f"blk.0.ffn_{part}_exps.bias"] = (bias.float().numpy(), "F32")
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "test")
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    stated = {"quantization_config": {"quant_method": "gguf", "files": [str(path)]}}
    (tmp_path / "config.json").write_text(json.dumps(stated))
    layer = ExpertStore.load(tmp_path, {0: "blk.0"}, ExpertShape(EXPERTS, 64, 96), mlp=mlp).layers[0]
    single = load(tmp_path / "single", per_expert_tensors(experts, "m"), mlp, 64, 96)
    assert torch.equal(out_of(layer), out_of(single))
    with pytest.raises(CheckpointError, match=r"_exps.bias' is a bias, but the experts of this family have none"):
        ExpertStore.load(tmp_path, {0: "blk.0"}, ExpertShape(EXPERTS, 64, 96), mlp=replace(mlp, has_bias=False))


def spoiled(tensors: dict[str, Tensor], name: str, change: Any) -> dict[str, Tensor]:
    return {**tensors, name: change(tensors[name].clone())}


def with_nan(tensor: Tensor) -> Tensor:
    tensor.view(-1)[-3] = float("nan")
    return tensor


GPT_OSS = LAYOUTS["interleaved and transposed"]


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("m.gate_up_proj", with_nan, r"tensor 'm.gate_up_proj' holds NaN or Inf at element 13437"),
        ("m.gate_up_proj_bias", with_nan, r"tensor 'm.gate_up_proj_bias' holds NaN or Inf at element 333"),
        ("m.down_proj_bias", lambda t: t[:, 1:].clone(), r"'m.down_proj_bias' has shape \[3, 39\], expected \[3, 40\]"),
        ("m.gate_up_proj_bias", Tensor.long, r"'m.gate_up_proj_bias' has dtype I64, expected BF16 or F16 or F32"),
        (
            "m.gate_up_proj",
            lambda t: t.transpose(1, 2).contiguous(),
            r"'m.gate_up_proj' has shape \[3, 112, 40\], expected \[3, 40, 112\]",
        ),
        (
            "m.gate_up_proj",
            lambda t: t.to(torch.float8_e4m3fn),
            r"dtype F8_E4M3, expected BF16, F16 or F32, because it is stored transposed",
        ),
    ],
)
def test_what_does_not_fit_the_table_is_refused(name: str, change: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=said):
        load(tmp_path, spoiled(fused(drawn(40, 56), GPT_OSS), name, change), GPT_OSS, 40, 56)


def test_a_missing_and_an_unexpected_bias_or_gate_are_refused(tmp_path: Path) -> None:
    tensors = fused(drawn(40, 56), BIASED)
    without = {name: tensor for name, tensor in tensors.items() if name != "m.down_proj_bias"}
    with pytest.raises(CheckpointError, match=r"tensor 'm.down_proj_bias' is missing"):
        load(tmp_path, without, BIASED, 40, 56)
    for mine in (tensors, per_expert_tensors(drawn(40, 56), "m")):
        with pytest.raises(CheckpointError, match=r"bias' is a bias, but the experts of this family have none"):
            load(tmp_path, mine, ExpertMlp(), 40, 56)
        with pytest.raises(CheckpointError, match=r"is a gate, but the activation of these experts has none"):
            load(tmp_path, mine, RELU, 40, 56)
