"""Every format that a checkpoint may come in: what is read is exactly what was meant, and what is refused is named."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import quantized
from reference.moe import ReferenceExperts, random_experts
from safetensors.torch import save_file
from torch import Tensor

from kt_runtime.errors import CheckpointError, InvalidValueError, UnknownNameError
from kt_runtime.experts import ExpertShape, ExpertStore

KEY = "model.layers.1.mlp.experts"
SHAPE = ExpertShape(num_experts=2, hidden=128, intermediate=256)
Spoil = Callable[[dict[str, Tensor]], object]
ChangeConfig = Callable[[Any], Any]
# One scale a row, or fp8: sizes need not divide anything.
ANY_SIZE = [
    name
    for name, scheme in quantized.SCHEMES.items()
    if scheme.format in ("bf16", "fp8_e4m3", "fp8_e4m3_g128") or name in ("int4_channel", "int8", "int8_packed")
]


def reference_experts(shape: ExpertShape = SHAPE, seed: int = 3) -> ReferenceExperts:
    return random_experts(shape.num_experts, shape.hidden, shape.intermediate, seed=seed)


def load(directory: Path, shape: ExpertShape = SHAPE, **options: Any) -> ExpertStore:
    return ExpertStore.load(directory, {1: KEY}, shape, **options)


def held(store: ExpertStore) -> ReferenceExperts:
    parts = zip(*(store.layers[1].unpacked(e) for e in range(store.shape.num_experts)), strict=True)
    gate, up, down = (torch.stack(part).float() for part in parts)
    return ReferenceExperts(gate, up, down)


def assert_holds(store: ExpertStore, values: ReferenceExperts) -> None:
    got = held(store)
    for part in ("gate", "up", "down"):
        assert torch.equal(getattr(got, part), getattr(values, part).float()), part


def relative_error(got: ReferenceExperts, wanted: ReferenceExperts) -> float:
    pairs = [(getattr(got, part).double(), getattr(wanted, part).double()) for part in ("gate", "up", "down")]
    return max(((a - b).norm() / b.norm()).item() for a, b in pairs)


@pytest.mark.parametrize("num_nodes", [1, 2])
@pytest.mark.parametrize("scheme", quantized.SCHEMES)
def test_a_checkpoint_is_read_exactly(tmp_path: Path, scheme: str, num_nodes: int) -> None:
    values = quantized.write_checkpoint(tmp_path, {KEY: reference_experts()}, scheme)[KEY]
    store = load(tmp_path, num_nodes=num_nodes)
    assert store.format == quantized.SCHEMES[scheme].format
    assert_holds(store, values)


@pytest.mark.parametrize("sizes", [(1, 1), (40, 24), (47, 33), (200, 304)])
@pytest.mark.parametrize("scheme", ANY_SIZE)
def test_sizes_need_not_divide_where_scales_do_not_ask_for_it(
    tmp_path: Path, scheme: str, sizes: tuple[int, int]
) -> None:
    shape = ExpertShape(3, *sizes)
    if scheme == "fp8_fused" and shape.intermediate % 16:
        shape = ExpertShape(3, shape.hidden, 48)
    values = quantized.write_checkpoint(tmp_path, {KEY: reference_experts(shape)}, scheme)[KEY]
    for num_nodes in (1, 3):
        assert_holds(load(tmp_path, shape, num_nodes=num_nodes), values)


def test_the_fingerprint_does_not_depend_on_memory_nodes_but_on_the_format(tmp_path: Path) -> None:
    prints = set()
    for scheme in ("int4_g32", "gptq_int4_g32", "awq_g128"):
        quantized.write_checkpoint(tmp_path, {KEY: reference_experts()}, scheme)
        found = {
            load(tmp_path, num_nodes=nodes, num_threads=threads).fingerprint()
            for nodes, threads in ((1, 1), (2, 2), (3, 1))
        }
        assert len(found) == 1
        prints |= found
    assert len(prints) == 3


def test_figures_of_a_quantized_store(tmp_path: Path) -> None:
    quantized.write_checkpoint(tmp_path, {KEY: reference_experts()}, "gptq_int4_g128_zp")
    store = load(tmp_path)
    elements = 2 * 3 * 128 * 256
    assert store.weight_bytes == elements // 2 + elements // 128 * (2 + 0.5)  # codes, float16 scales, 4-bit zeros
    assert store.weight_bytes < store.resident_bytes <= 1.15 * store.weight_bytes


def test_layers_of_several_formats_are_told_apart(tmp_path: Path) -> None:
    first, values = quantized.checkpoint_tensors(reference_experts(), "fp8", KEY)
    second, _ = quantized.checkpoint_tensors(reference_experts(), "bf16", "left.out")
    save_file(first | second, tmp_path / "model.safetensors")
    quantized.write_config(tmp_path, "fp8")
    store = ExpertStore.load(tmp_path, {1: KEY, 2: "left.out"}, SHAPE)
    assert store.format == "bf16+fp8_e4m3_g128"
    assert [layer.format for layer in store.layers.values()] == ["fp8_e4m3_g128", "bf16"]
    assert_holds(store, values)


@pytest.mark.parametrize("scheme", ["bf16", "bf16_fused", "fp8", "fp8_fused", "fp8_channel"])
@pytest.mark.parametrize(("wanted", "name", "bound"), [("int8", "int8", 0.01), ("int4", "int4_g32", 0.12)])
def test_quantizing_while_loading_stays_within_its_error(
    tmp_path: Path, scheme: str, wanted: str, name: str, bound: float
) -> None:
    shape = ExpertShape(2, 512, 384)
    values = quantized.write_checkpoint(tmp_path, {KEY: reference_experts(shape)}, scheme)[KEY]
    store = load(tmp_path, shape, expert_format=wanted, num_nodes=2)
    assert store.format == name
    assert relative_error(held(store), values) <= bound


@pytest.mark.parametrize("wanted", ["int8", "int4"])
def test_quantizing_takes_zeros_extremes_and_any_size(tmp_path: Path, wanted: str) -> None:
    shape = ExpertShape(1, 45, 19)
    experts = reference_experts(shape)
    experts.gate[0, 3] = 0
    experts.gate[0, 4] *= 1e30
    experts.gate[0, 5] *= 1e-30
    experts.gate[0, 6, :] = 2.0**-133  # below the smallest normal number
    values = quantized.write_checkpoint(tmp_path, {KEY: experts}, "bf16")[KEY]
    got = held(load(tmp_path, shape, expert_format=wanted))
    assert torch.equal(got.gate[0, 3], torch.zeros(45))
    for row in (4, 5, 7):
        wide = values.gate[0, row].double()
        assert (got.gate[0, row].double() - wide).norm() <= 0.15 * wide.norm()
    assert got.gate[0, 6].isfinite().all()
    assert (
        relative_error(ReferenceExperts(got.up, got.up, got.down), ReferenceExperts(values.up, values.up, values.down))
        <= 0.12
    )


@pytest.mark.parametrize("scheme", ["int4_g32", "int8", "gptq_int4_g128", "awq_g128"])
def test_an_integer_checkpoint_is_not_quantized_again(tmp_path: Path, scheme: str) -> None:
    quantized.write_checkpoint(tmp_path, {KEY: reference_experts()}, scheme)
    name = quantized.SCHEMES[scheme].format
    with pytest.raises(InvalidValueError, match=f"expert format 'int8' quantizes bf16 and fp8.* are {name} already"):
        load(tmp_path, expert_format="int8")


def test_an_unknown_expert_format_lists_the_known(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match=r"unknown expert format 'int5'.*int4.*int8"):
        load(tmp_path, expert_format="int5")


def test_block_scales_of_compressed_tensors_are_read(tmp_path: Path) -> None:
    tensors, values = quantized.checkpoint_tensors(reference_experts(), "fp8", KEY)
    save_file({k.replace("_inv", ""): t for k, t in tensors.items()}, tmp_path / "model.safetensors")
    config = quantized.compressed_config("float-quantized", 8, 0, kind="float")
    config["config_groups"]["group_0"]["weights"] |= {"strategy": "block", "block_structure": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    assert_holds(load(tmp_path), values)


def test_of_several_config_groups_the_one_that_fits_is_taken(tmp_path: Path) -> None:
    values = quantized.write_checkpoint(tmp_path, {KEY: reference_experts()}, "int4_g32")[KEY]
    config = copy.deepcopy(quantized.SCHEMES["int4_g32"].config)
    assert config is not None
    attention = copy.deepcopy(config["config_groups"]["group_0"])
    attention["weights"] |= {"num_bits": 8, "group_size": 128}
    config["config_groups"] = {"group_0": attention, "group_1": config["config_groups"]["group_0"]}
    # Multimodal models keep the text model's configuration one level down.
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"quantization_config": config}}))
    assert_holds(load(tmp_path), values)


def test_numbers_that_python_writes_beyond_json_do_not_stop_the_reading(tmp_path: Path) -> None:
    values = quantized.write_checkpoint(
        tmp_path, {KEY: reference_experts()}, "fp8", {"limit": float("inf"), "low": -float("inf"), "none": float("nan")}
    )[KEY]
    assert "-Infinity" in (tmp_path / "config.json").read_text()
    assert_holds(load(tmp_path), values)


# --- what is refused ------------------------------------------------------------------------------------------------


def spoiled(
    tmp_path: Path,
    scheme: str,
    tensor: Spoil | None = None,
    config: ChangeConfig | None = None,
    shape: ExpertShape = SHAPE,
) -> None:
    """Writes the scheme's checkpoint after `tensor` changed its tensors and `config` its quantization_config."""
    tensors, _ = quantized.checkpoint_tensors(reference_experts(shape), scheme, KEY)
    if tensor is not None:
        tensor(tensors)
    quantization = copy.deepcopy(quantized.SCHEMES[scheme].config)
    if config is not None:
        quantization = config(quantization)
    save_file(tensors, tmp_path / "model.safetensors")
    content = {} if quantization is None else {"quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(content))


def drop(name: str) -> Spoil:
    return lambda tensors: tensors.pop(f"{KEY}.{name}")


def put(name: str, tensor: Tensor) -> Spoil:
    return lambda tensors: tensors.__setitem__(f"{KEY}.{name}", tensor)


def element(name: str, index: int | tuple[int, int], value: float) -> Spoil:
    return lambda tensors: tensors[f"{KEY}.{name}"].__setitem__(index, value)


def bits(name: str, index: tuple[int, int], value: int) -> Spoil:
    """Sets one byte of an fp8 tensor."""
    return lambda tensors: tensors[f"{KEY}.{name}"].view(torch.uint8).__setitem__(index, value)


def every(suffix: str, change: Callable[[Tensor], Tensor]) -> Spoil:
    def spoil(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(suffix)]:
            tensors[name] = change(tensors[name])

    return spoil


TENSOR_FAULTS = [
    (
        "bf16",
        put("0.gate_proj.weight", torch.zeros(256, 128).double()),
        r"gate_proj.weight' has dtype F64, expected BF",
    ),
    (
        "bf16",
        put("0.gate_proj.weight", torch.zeros(256, 128).int()),
        r"dtype I32, .*supported: bfloat16, float16, float3",
    ),
    (
        "bf16",
        put("0.gate_proj.weight_scale_inv", torch.ones(2, 1)),
        r"weight_scale_inv' is a scale, but .* not quantized",
    ),
    (
        "bf16_fused",
        put("gate_up_proj", torch.zeros(2, 512, 128).double()),
        r"gate_up_proj' has dtype F64, expected BF16, F",
    ),
    ("bf16_fused", put("down_proj", torch.zeros(2, 128, 255).bfloat16()), r"down_proj' has shape \[2, 128, 255\]"),
    ("fp8", bits("1.up_proj.weight", (255, 127), 0x7F), r"1.up_proj.weight' holds NaN at element 32767"),
    ("fp8", bits("1.up_proj.weight", (0, 3), 0xFF), r"1.up_proj.weight' holds NaN at element 3"),
    (
        "fp8_fused",
        lambda t: t[f"{KEY}.gate_up_proj"].view(torch.uint8).__setitem__((1, 256, 5), 0x7F),
        r"gate_up_proj' holds NaN at element 98309",
    ),
    ("fp8", drop("0.down_proj.weight_scale_inv"), r"0.down_proj.weight_scale_inv' is missing"),
    ("fp8", put("0.down_proj.weight_scale_inv", torch.ones(2, 2)), r"shape \[2, 2\], expected \[1, 2\]"),
    ("fp8", put("0.down_proj.weight_scale_inv", torch.ones(1, 2).int()), r"dtype I32, expected F32 or BF16 or F16"),
    ("fp8", element("0.down_proj.weight_scale_inv", (0, 1), float("nan")), r"scale -?nan .* at element 1"),
    ("fp8", element("0.down_proj.weight_scale_inv", (0, 1), float("inf")), r"scale inf .* at element 1"),
    ("fp8", element("0.down_proj.weight_scale_inv", (0, 0), -1.0), r"scale -1.0+ \(allowed: above 0, below 1e30\)"),
    ("fp8", element("0.down_proj.weight_scale_inv", (0, 0), 0.0), r"scale 0.0+ \(allowed: above 0"),
    ("fp8", put("1.gate_proj.weight", torch.zeros(256, 128).to(torch.float8_e5m2)), r"F8_E5M2, expected F8_E4M3"),
    ("fp8_channel", put("0.gate_proj.weight_scale", torch.ones(1)), r"has shape \[1\], expected \[256, 1\]"),
    ("int4_g32", drop("1.gate_proj.weight_shape"), r"1.gate_proj.weight_shape' is missing"),
    ("int4_g32", element("1.gate_proj.weight_shape", 0, 255), r"holds \[255, 128\], expected \[256, 128\]"),
    ("int4_g32", put("1.gate_proj.weight_packed", torch.zeros(256, 15).int()), r"\[256, 15\], expected \[256, 16\]"),
    ("int4_g32", put("1.gate_proj.weight_zero_point", torch.zeros(32, 4).int()), r"but quantization_config says symm"),
    ("int4_g32", put("0.gate_proj.weight_g_idx", torch.zeros(128).int()), r"actorder is null, .*\(no weight_g_idx\)"),
    ("int4_g32", element("0.up_proj.weight_scale", (3, 1), float("inf")), r"up_proj.weight_scale' .* at element 13"),
    ("int4_g32_zp", drop("0.up_proj.weight_zero_point"), r"0.up_proj.weight_zero_point' is missing"),
    ("int8_g128_zp", put("0.up_proj.weight_zero_point", torch.zeros(256, 1).int()), r"has dtype I32, expected I8"),
    ("gptq_int4_g128", element("0.gate_proj.g_idx", 64, 1), r"puts column 64 into group 1, expected 0: .*desc_act"),
    ("gptq_int4_g128", element("0.down_proj.qzeros", (1, 0), 0), r"qzeros' holds zero point 1 of output 0, but .*symm"),
    ("gptq_int4_g128", drop("0.down_proj.scales"), r"0.down_proj.scales' is missing"),
    ("gptq_int4_g128", put("0.gate_proj.qweight", torch.zeros(128, 32).int()), r"\[128, 32\], expected \[16, 256\]"),
    ("gptq_int4_g128", element("1.up_proj.scales", (0, 9), float("nan")), r"1.up_proj.scales' .* at element 9"),
    ("awq_g128", put("0.gate_proj.qweight", torch.zeros(16, 256).int()), r"\[16, 256\], expected \[128, 32\]"),
    ("awq_g128", drop("1.gate_proj.qzeros"), r"1.gate_proj.qzeros' is missing"),
]


@pytest.mark.parametrize(("scheme", "spoil", "message"), TENSOR_FAULTS)
def test_unfit_tensors_are_named(tmp_path: Path, scheme: str, spoil: Spoil, message: str) -> None:
    spoiled(tmp_path, scheme, spoil)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def replaced(**changes: Any) -> ChangeConfig:
    return lambda config: {**config, **changes}


def weights(**changes: Any) -> ChangeConfig:
    def change(config: dict[str, Any]) -> dict[str, Any]:
        config["config_groups"]["group_0"]["weights"].update(changes)
        return config

    return change


CONFIG_FAULTS = [
    ("fp8", replaced(weight_block_size=[64, 128]), r"weight_block_size is \[64, 128\], but .* need \[128, 128\]"),
    ("fp8", replaced(quant_method="gptq"), r"quant_method is 'gptq', but .* need 'fp8'"),
    ("fp8_channel", replaced(quant_method="fp8"), r"quant_method is 'fp8', but .* need 'compressed-tensors'"),
    ("fp8_channel", weights(strategy="tensor"), r"weights.strategy is 'tensor', but .* need 'channel' or 'block'"),
    ("int4_g32", lambda _: None, r"are quantized, but config.json has no quantization_config"),
    ("int4_g32", replaced(quant_method="bitsandbytes"), r"quant_method is 'bitsandbytes'"),
    ("int4_g32", replaced(config_groups={}), r"config_groups is an object, but .* need at least one group"),
    ("int4_g32", weights(num_bits=3), r"weights.num_bits is 3, but .* need 4 or 8"),
    ("int4_g32", weights(group_size=48), r"weights.group_size is 48, but .* need a multiple of 32"),
    ("int4_g32", weights(group_size=None), r"weights.group_size is null"),
    ("int4_g32", weights(type="float"), r"weights.type is 'float', but .* need 'int'"),
    ("int4_g32", weights(actorder="group"), r"weights.actorder is 'group'"),
    ("int4_g32", weights(symmetric=False), r"weight_zero_point' is missing"),
    ("int4_g32", weights(group_size=64), r"weight_scale' has shape \[256, 4\], expected \[256, 2\]"),
    ("int4_g32", weights(num_bits=8), r"weight_packed' has shape \[256, 16\], expected \[256, 32\]"),
    ("int8", weights(num_bits=4), r"weights.num_bits is 4, but .* need 8"),
    ("gptq_int4_g128", lambda _: None, r"expected quant_method 'gptq' or 'awq'"),
    ("gptq_int4_g128", replaced(bits=3), r"bits is 3, but .* need 4 or 8"),
    ("gptq_int4_g128", replaced(group_size=16), r"group_size is 16, but .* need a multiple of 32, or -1"),
    ("gptq_int4_g128", replaced(checkpoint_format="marlin"), r"checkpoint_format is 'marlin', but .* 'gptq_v2'"),
    ("gptq_int4_g128", replaced(quant_method="awq", version="gemm", zero_point=True), r"expected \[128, 32\]"),
    ("awq_g128", replaced(version="gemv"), r"version is 'gemv', but .* need 'gemm'"),
    ("awq_g128", replaced(zero_point=False), r"zero_point is false, but .* need true"),
    ("awq_g128", replaced(bits=8), r"bits is 8, but .* need 4"),
]


@pytest.mark.parametrize(("scheme", "change", "message"), CONFIG_FAULTS)
def test_a_contradicting_config_is_named(tmp_path: Path, scheme: str, change: ChangeConfig, message: str) -> None:
    spoiled(tmp_path, scheme, config=change)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_desc_act_without_its_order_is_refused(tmp_path: Path) -> None:
    spoiled(tmp_path, "gptq_int4_g128", drop("0.gate_proj.g_idx"), replaced(desc_act=True))
    with pytest.raises(CheckpointError, match=r"desc_act is true, but .* need g_idx, which is missing"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("scheme", "sizes", "message"),
    [
        ("int4_g32", (160, 128), r"'.*0.gate_proj' has 160 inputs, in groups, not a multiple of 128"),
        ("gptq_int4_channel", (128, 60), r"'.*0.gate_proj' has 60 outputs, not a multiple of 8"),
        ("gptq_int4_channel", (60, 128), r"'.*0.gate_proj' has 60 inputs, not a multiple of 8"),
        ("fp8_fused", (128, 40), r"has 40 outputs, fused in fp8, not a multiple of 16"),
    ],
)
def test_sizes_that_do_not_divide_are_named(tmp_path: Path, scheme: str, sizes: tuple[int, int], message: str) -> None:
    config = weights(group_size=128) if scheme == "int4_g32" else None
    spoiled(tmp_path, scheme, config=config)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, ExpertShape(2, *sizes))


@pytest.mark.parametrize("scheme", ["fp8", "int4_g32", "gptq_int4_g128_zp", "awq_g128", "nvfp4", "mxfp8"])
def test_a_truncated_file_is_refused(tmp_path: Path, scheme: str) -> None:
    quantized.write_checkpoint(tmp_path, {KEY: reference_experts()}, scheme)
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    for keep in (0.001, 0.3, 0.999):
        path.write_bytes(content[: int(len(content) * keep)])
        with pytest.raises(CheckpointError, match=re.escape(str(path))):
            load(tmp_path)


def test_a_config_that_is_not_json_is_refused(tmp_path: Path) -> None:
    quantized.write_checkpoint(tmp_path, {KEY: reference_experts()}, "fp8")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config.json: not JSON"):
        load(tmp_path)


@pytest.mark.parametrize("num_nodes", [0, -1, 9])
def test_the_number_of_memory_nodes_is_checked(tmp_path: Path, num_nodes: int) -> None:
    quantized.write_checkpoint(tmp_path, {KEY: reference_experts()}, "bf16")
    with pytest.raises(InvalidValueError, match=f"num_nodes is {num_nodes}"):
        load(tmp_path, num_nodes=num_nodes)
