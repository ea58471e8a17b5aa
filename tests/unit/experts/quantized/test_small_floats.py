"""NVFP4, MXFP4, MXFP8, and int8 and e4m3 by row, as the `compressed_tensors` package writes and reads them.

The package quantizes, and dequantizes again in float32; the store and the dense loader read what it wrote. What none of
them may read is refused.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.mx_utils import decompress_mx_scale
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from reference import moe, quantized
from reference.drawn import drawn
from reference.expert_problems import random_problem, tensors_of
from reference.instruction_sets import instruction_sets
from reference.moe import random_experts
from safetensors.torch import save_file
from torch import Tensor

from kt_runtime.errors import CheckpointError
from kt_runtime.experts import ExpertShape, ExpertStore
from kt_runtime.experts.dequantize import plain_tensors
from kt_runtime.families.quantization import quantization_of

KEY = "model.layers.0.mlp.experts"
HIDDEN, INNER = 96, 64
SHAPE = ExpertShape(2, HIDDEN, INNER)
# A weight is off by a unit in the last place at most, 2^-23: the package divides by a scale that others multiply with.
FLOAT32 = 1.2e-7  # 1.14e-7 measured
# Of a result's norm; three times as much for gradients.
FLOAT32_RESULT = 2e-6  # 6.1e-7 measured, 4.1e-7 of gradients
INTEGER_ACTIVATIONS = 0.03  # of a small layer: activations are in int8; 0.0123 measured, 0.024 of gradients
BF16_ACTIVATIONS = 2.0**-7  # factors and results are rounded; 2.6e-3 measured, of gradients too
PRESETS = {
    "W8A8": ("int-quantized", "int8"),
    "FP8_DYNAMIC": ("float-quantized", "fp8_e4m3"),
    "NVFP4": ("nvfp4-pack-quantized", "nvfp4_g16"),
    "NVFP4A16": ("nvfp4-pack-quantized", "nvfp4_g16"),
    "MXFP4": ("mxfp4-pack-quantized", "mxfp4_g32"),
    "MXFP8": ("mxfp8-quantized", "mxfp8_g32"),
}


def scales_of(weight: Tensor, scheme: QuantizationScheme) -> dict[str, Tensor]:
    """As llm-compressor's observers make them: from the largest magnitude of a row or a group."""
    args = scheme.weights
    assert args is not None
    groups = weight.unflatten(1, (-1, args.group_size or weight.shape[1])).abs().amax(2)
    if args.type == "int":
        return {"weight_scale": groups / 127.5}
    if args.strategy == "tensor_group":
        divisor = 448 * 6 / groups.max()
        scales = (groups / 6 * divisor).to(torch.float8_e4m3fn).float()
        return {"weight_scale": scales, "weight_global_scale": divisor.reshape(1)}
    scales = groups / (6 if args.num_bits == 4 else 448)
    return {"weight_scale": scales.log2().ceil().exp2() if args.group_size else scales}


def compressed(preset: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """What the package stores of a matrix, and what it reads back in float32."""
    scheme = preset_name_to_scheme(preset, ["Linear"])
    compressor = BaseCompressor.get_value_from_registry(PRESETS[preset][0])
    stored = compressor.compress({"weight": weight, **scales_of(weight, scheme)}, scheme)
    values = compressor.decompress(dict(stored), scheme)["weight"].float()
    if "weight_packed" in stored:  # which the package reads in bfloat16 alone
        values = in_float32(stored)
    if scheme.input_activations is not None and scheme.input_activations.dynamic == "local":
        stored["input_global_scale"] = torch.tensor([7.0])
    return stored, values


def in_float32(stored: dict[str, Tensor]) -> Tensor:
    rows, half = stored["weight_packed"].shape
    codes = unpack_fp4_from_uint8(stored["weight_packed"], rows, 2 * half, torch.float32)
    scales = stored["weight_scale"]
    scales = decompress_mx_scale(scales).float() if scales.dtype == torch.uint8 else scales.float()
    return dequantize(codes, scales, global_scale=stored.get("weight_global_scale"), dtype=torch.float32)


def config_of(preset: str) -> dict[str, Any]:
    scheme = preset_name_to_scheme(preset, ["Linear"])
    group = json.loads(scheme.model_dump_json())
    return {
        "quant_method": "compressed-tensors",
        "format": PRESETS[preset][0],
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def loaded(directory: Path) -> ExpertStore:
    return ExpertStore.load(directory, {0: KEY}, SHAPE)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_store_and_the_dense_loader_read_what_the_package_wrote(preset: str, tmp_path: Path) -> None:
    tensors: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for expert in range(2):
        for index, part in enumerate(("gate_proj", "up_proj", "down_proj")):
            rows, cols = (HIDDEN, INNER) if part == "down_proj" else (INNER, HIDDEN)
            stored, values[f"{expert}.{part}"] = compressed(preset, drawn(rows, cols, seed=7 * expert + index))
            tensors |= {f"{KEY}.{expert}.{part}.{name}": tensor.contiguous() for name, tensor in stored.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config_of(preset)}))
    store = loaded(tmp_path)
    assert store.format == PRESETS[preset][1]
    dense = dict(plain_tensors([str(tmp_path / "model.safetensors")], torch.float32))
    assert set(dense) == {f"{KEY}.{name}.weight" for name in values}
    for expert in range(2):
        for part, found in zip(("gate_proj", "up_proj", "down_proj"), store.layers[0].unpacked(expert), strict=True):
            wanted = values[f"{expert}.{part}"]
            assert ((found - wanted).abs() <= FLOAT32 * wanted.abs()).all()
            assert torch.equal(dense[f"{KEY}.{expert}.{part}.weight"], found)


@pytest.mark.parametrize(("scheme", "bits"), [("nvfp4", 4.5), ("mxfp4", 4.25), ("mxfp8", 8.25)])
def test_the_plan_of_memory_knows_what_the_store_takes(scheme: str, bits: float, tmp_path: Path) -> None:
    quantized.write_checkpoint(tmp_path, {KEY: random_experts(2, HIDDEN, INNER, seed=3)}, scheme)
    store = loaded(tmp_path)
    assert store.weight_bytes == 2 * 3 * HIDDEN * INNER * bits / 8
    found = quantization_of({"quantization_config": quantized.SCHEMES[scheme].config})
    assert found is not None
    held = found.expert_format
    assert store.resident_bytes == 2 * (2 * held.packed_bytes(INNER, HIDDEN) + held.packed_bytes(HIDDEN, INNER))


def test_every_code_and_scale_of_the_small_floats_has_its_value(tmp_path: Path) -> None:
    """All 16 codes of e2m1 with all scales of e4m3; all codes of e4m3 with some exponents."""
    numbers = torch.arange(128, dtype=torch.uint8)[:127].view(torch.float8_e4m3fn)  # without NaN
    codes = (torch.arange(8, dtype=torch.uint8) * 2).repeat(127, 1)  # the codes 2 i and 2 i + 1
    nvfp4 = {"weight_packed": codes | (codes + 1) << 4, "weight_scale": numbers[:, None]}
    dense = plain_of(tmp_path, {**nvfp4, "weight_global_scale": torch.tensor([4.0])})
    assert torch.equal(dense, numbers.float()[:, None] / 4 * torch.tensor(quantized.FP4_VALUES + NEGATIVE))
    signed = (numbers.view(torch.uint8) | 0x80).view(torch.float8_e4m3fn)
    every = torch.cat([numbers, signed, numbers[:2]]).view(8, 32)
    exponents = torch.tensor([1, 100, 126, 127, 128, 140, 200, 0], dtype=torch.uint8)[:, None]
    dense = plain_of(tmp_path, {"weight": every, "weight_scale": exponents})
    powers = (exponents.double() - 127).exp2() * (exponents > 0)
    assert torch.equal(dense.double(), every.double() * powers)


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("scheme", ["nvfp4", "mxfp4", "mxfp8"])
def test_forward_and_backward_are_the_reference_on_every_instruction_set(scheme: str, isa: str, tmp_path: Path) -> None:
    hidden, inner = (112, 80) if scheme == "nvfp4" else (96, 160)  # of nvfp4 the last unit is half a unit
    for dtype, tokens, nodes in ((torch.float32, 5, 1), (torch.bfloat16, 3, 2), (torch.bfloat16, 40, 1)):
        p = random_problem(3, hidden, inner, tokens, 2, dtype=dtype, ranks=(4,))
        values = quantized.write_checkpoint(tmp_path, {"m": p.experts}, scheme)["m"]
        shape = ExpertShape(3, hidden, inner)
        layer = ExpertStore.load(tmp_path, {0: "m"}, shape, isa=isa, num_threads=2, num_nodes=nodes).layers[0]
        leaves = [t.double().requires_grad_() for t in tensors_of(p.adapters[0])]
        x, weights = p.x.double().requires_grad_(), p.weights.double()
        slots = [(leaves, p.adapters[0].scaling)]
        wanted = moe.routed_experts(values, x, p.ids, weights, slots=slots, token_slots=p.token_slots)
        grads = torch.autograd.grad(wanted, [x, *leaves], p.grad_out.double(), materialize_grads=True)
        low = BF16_ACTIVATIONS if scheme == "mxfp8" else INTEGER_ACTIVATIONS
        limit = FLOAT32_RESULT if dtype == torch.float32 else low
        found = layer.backward(p.grad_out, p.x, p.ids, p.weights, **p.lora)
        pairs = [(layer.forward(p.x, p.ids, p.weights, **p.lora), wanted, limit)]
        pairs += [
            (got, grad, 3 * limit) for got, grad in zip([found.x, *tensors_of(found.slots[0])], grads, strict=True)
        ]
        for got, exact, bound in pairs:
            assert (got.double() - exact).norm() <= bound * exact.norm()


NEGATIVE = tuple(-value for value in quantized.FP4_VALUES)


def plain_of(directory: Path, parts: dict[str, Tensor]) -> Tensor:
    save_file({f"a.{name}": tensor for name, tensor in parts.items()}, directory / "a.safetensors")
    return dict(plain_tensors([str(directory / "a.safetensors")], torch.float32))["a.weight"]


Spoil = Callable[[dict[str, Tensor]], object]


def put(name: str, value: float, at: int = 3) -> Spoil:
    """Writes `value`, of bytes their code, to an element of a tensor of the second expert's down matrix."""

    def spoil(tensors: dict[str, Tensor]) -> None:
        flat = tensors[f"{KEY}.1.down_proj.{name}"].reshape(-1)
        (flat.view(torch.uint8) if flat.dtype.itemsize == 1 else flat)[at] = value

    return spoil


def replace(name: str, made: Callable[[Tensor], Tensor]) -> Spoil:
    return lambda tensors: tensors.update({f"{KEY}.1.down_proj.{name}": made(tensors[f"{KEY}.1.down_proj.{name}"])})


@pytest.mark.parametrize(
    ("scheme", "spoil", "said"),
    [
        ("nvfp4", put("weight_scale", 0x7F), r"down_proj.weight_scale' holds scale nan .* at element 3"),
        ("nvfp4", put("weight_scale", 0x88), r"weight_scale' holds scale -0.015625 \(allowed: numbers .* element 3"),
        ("nvfp4", put("weight_global_scale", 0.0, 0), r"weight_global_scale' holds scale 0.000000 \(allowed: above"),
        ("nvfp4", put("weight_global_scale", float("inf"), 0), r"weight_global_scale' holds scale inf"),
        ("nvfp4", put("weight_global_scale", float("nan"), 0), r"weight_global_scale' holds scale nan"),
        ("nvfp4", replace("weight_global_scale", lambda t: t[:0]), r"shape \[0\], expected \[1\]"),
        ("nvfp4", replace("weight_global_scale", lambda t: t.bfloat16()), r"dtype BF16, expected F32"),
        ("nvfp4", replace("weight_scale", lambda t: t[:, :-1].contiguous()), r"weight_scale' has shape \[96, 3\], exp"),
        ("nvfp4", replace("weight_scale", lambda t: t.float()), r"weight_scale' has dtype F32, expected F8_E4M3"),
        ("nvfp4", lambda t: t.pop(f"{KEY}.1.down_proj.weight_global_scale"), r"weight_global_scale' is missing"),
        ("nvfp4_modelopt", lambda t: t.pop(f"{KEY}.1.down_proj.weight_scale_2"), r"weight_scale_2' is missing"),
        ("nvfp4_modelopt", replace("weight", lambda t: t.view(torch.int8)), r"weight' has dtype I8, expected U8"),
        ("mxfp8", put("weight_scale", 255), r"weight_scale' holds a scale that is NaN at element 3"),
        ("mxfp8", put("weight_scale", 230), r"weight_scale' holds scale 2\^103 \(allowed: below 1e30\) at element 3"),
        ("mxfp8", put("weight", 0xFF), r"down_proj.weight' holds NaN at element 3"),
        ("mxfp4", put("weight_scale", 255), r"weight_scale' holds a scale that is NaN at element 3"),
    ],
)
def test_a_spoiled_tensor_is_refused_with_its_name_and_place(
    scheme: str, spoil: Spoil, said: str, tmp_path: Path
) -> None:
    experts = random_experts(2, HIDDEN, INNER, seed=3)
    tensors, _ = quantized.checkpoint_tensors(experts, scheme, KEY)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    spoil(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    quantized.write_config(tmp_path, scheme)
    with pytest.raises(CheckpointError, match=said):
        loaded(tmp_path)


@pytest.mark.parametrize(
    ("scheme", "weights", "others", "said"),
    [
        ("nvfp4", {"group_size": 32}, {}, r"weights.group_size is 32, but .* need 16"),
        ("nvfp4", {"strategy": "group"}, {}, r"weights.strategy is 'group', but .* need 'tensor_group'"),
        ("nvfp4", {"type": "int"}, {}, r"weights.type is 'int', but .* need 'float'"),
        ("nvfp4", {}, {"quant_method": "modelopt"}, r"quant_method is 'modelopt', but .* need 'compressed-tensors'"),
        ("nvfp4_modelopt", {}, {"quant_algo": "FP8"}, r"quant_algo is 'FP8', but .* need 'NVFP4'"),
        ("nvfp4_modelopt", {}, {"quant_method": "fp8"}, r"quant_method is 'fp8', but .* need 'modelopt'"),
        ("mxfp8", {"num_bits": 4}, {}, r"weights.num_bits is 4, but .* need 8"),
        ("mxfp8_method", {}, {"quant_method": "fp8"}, r"quant_method is 'fp8', but .* need 'mxfp8'"),
    ],
)
def test_a_config_that_contradicts_the_tensors_is_refused(
    scheme: str, weights: dict[str, Any], others: dict[str, Any], said: str, tmp_path: Path
) -> None:
    quantized.write_checkpoint(tmp_path, {KEY: random_experts(2, HIDDEN, INNER, seed=3)}, scheme)
    config = copy.deepcopy(quantized.SCHEMES[scheme].config)
    assert config is not None
    if weights:
        config["config_groups"]["group_0"]["weights"] |= weights
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config | others}))
    with pytest.raises(CheckpointError, match=said):
        loaded(tmp_path)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"weight_packed": torch.zeros(4, 16, dtype=torch.uint8)}, "only no scales"),
        (
            {
                "weight_packed": torch.zeros(4, 16, dtype=torch.uint8),
                "weight_scale": torch.ones(4, 2).to(torch.float8_e4m3fn),
            },
            "no scale of the matrix",
        ),
        (
            {
                "weight": torch.ones(4, 32).to(torch.float8_e4m3fn),
                "weight_scale": torch.full((4, 1), 255, dtype=torch.uint8),
            },
            "an exponent is 255; allowed: up to 226",
        ),
    ],
)
def test_dense_matrices_that_can_t_be_dequantized_are_refused(
    parts: dict[str, Tensor], said: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=said):
        plain_of(tmp_path, parts)
