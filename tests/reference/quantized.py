"""Expert checkpoints in every format that the store reads, with the exact values that they mean.

Written from the formats' descriptions, with torch and safetensors only, so that the reader has something to be compared
with. A weight is W[out, in] = scale * (code - zero); codes, scales and zeros are stored as each scheme says.

    tensors, values = checkpoint_tensors(experts, "int4_g32", "model.layers.1.mlp.experts")
    values = write_checkpoint(directory, {prefix: experts}, "gptq_int4_g128_zp")[prefix]

`values` are ReferenceExperts in float64 and can be given to reference.moe as they are. SCHEMES lists the names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from reference.moe import ReferenceExperts
from safetensors.torch import save_file
from torch import Tensor

PROJECTIONS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
FP8_BLOCK = 128
FP8_LARGEST = 448.0
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MX_GROUP, NVFP4_GROUP = 32, 16
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word holds output column AWQ_ORDER[i] of its eight

Matrix = tuple[dict[str, Tensor], Tensor]
"""What stands behind `prefix.E.gate_proj` (".weight" -> tensor, ...), and the float64 values."""


@dataclass(frozen=True)
class Scheme:
    """`format`: the name that ExpertStore.format gives. `config`: quantization_config of config.json, None for none."""

    format: str
    store: Callable[[Tensor], Matrix]
    config: dict[str, Any] | None = None
    fused: bool = False


@dataclass(frozen=True)
class Codes:
    """codes [out, in] and zeros [out, groups] unsigned in uint8, scales [out, groups]."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    values: Tensor = field(init=False)

    def __post_init__(self) -> None:
        out, cols = self.codes.shape
        groups = self.scales.shape[1]
        wide = self.codes.double().view(out, groups, -1) - self.zeros.double()[:, :, None]
        object.__setattr__(self, "values", (wide * self.scales.double()[:, :, None]).view(out, cols))


def integer_codes(weight: Tensor, bits: int, group: int, symmetric: bool, scale_dtype: torch.dtype) -> Codes:
    """Round to nearest with one scale for `group` columns of a row; group 0: for the whole row."""
    out, cols = weight.shape
    grouped = weight.double().view(out, -1, group or cols)
    most, middle = (1 << bits) - 1, 1 << (bits - 1)
    if symmetric:
        scales = (grouped.abs().amax(-1) / (middle - 0.5)).to(scale_dtype)
        zeros = torch.full(scales.shape, middle, dtype=torch.float64)
    else:
        low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
        scales = ((high - low) / most).to(scale_dtype)
        zeros = (-low / scales.double()).round().clamp(1, most)  # GPTQ cannot store a zero of 0
    codes = (grouped / scales.double()[:, :, None]).round() + zeros[:, :, None]
    return Codes(codes.clamp(0, most).view(out, cols).to(torch.uint8), scales, zeros.to(torch.uint8))


def packed_words(codes: Tensor, bits: int) -> Tensor:
    """Unsigned codes along the last dimension into int32 words, the first code in the lowest bits."""
    per_word = 32 // bits
    padded = torch.nn.functional.pad(codes.long(), (0, -codes.shape[-1] % per_word))
    grouped = padded.view(*codes.shape[:-1], -1, per_word)
    words = (grouped << (torch.arange(per_word) * bits)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def store_bf16(weight: Tensor) -> Matrix:
    return {".weight": weight.bfloat16()}, weight.bfloat16().double()


def store_fp8(weight: Tensor) -> Matrix:
    """DeepSeek-V3: e4m3 with a float32 scale for each block of 128 x 128, the last of a row or column shorter."""
    out, cols = weight.shape
    row, col = torch.arange(out) // FP8_BLOCK, torch.arange(cols) // FP8_BLOCK
    blocks = torch.zeros(int(row[-1]) + 1, int(col[-1]) + 1)
    wide = weight.float().abs()
    for r in range(blocks.shape[0]):
        for c in range(blocks.shape[1]):
            blocks[r, c] = wide[row == r][:, col == c].max() / FP8_LARGEST
    expanded = blocks[row][:, col]
    codes = (weight.float() / expanded).clamp(-FP8_LARGEST, FP8_LARGEST).to(torch.float8_e4m3fn)
    return {".weight": codes, ".weight_scale_inv": blocks}, codes.double() * expanded.double()


def store_fp8_channel(weight: Tensor) -> Matrix:
    """compressed-tensors float-quantized: e4m3 with a scale for each row."""
    scales = (weight.float().abs().amax(1, keepdim=True) / FP8_LARGEST).bfloat16()
    codes = (weight.float() / scales.float()).clamp(-FP8_LARGEST, FP8_LARGEST).to(torch.float8_e4m3fn)
    return {".weight": codes, ".weight_scale": scales}, codes.double() * scales.double()


def store_packed(bits: int, group: int, symmetric: bool = True) -> Callable[[Tensor], Matrix]:
    """compressed-tensors pack-quantized, as Kimi-K2-Thinking ships it (bits 4, group 32, symmetric)."""

    def store(weight: Tensor) -> Matrix:
        made = integer_codes(weight, bits, group, symmetric, torch.bfloat16)
        tensors = {
            ".weight_packed": packed_words(made.codes, bits),
            ".weight_scale": made.scales,
            ".weight_shape": torch.tensor(weight.shape, dtype=torch.int32),
        }
        if not symmetric:  # packed along the output
            tensors[".weight_zero_point"] = packed_words(made.zeros.t(), bits).t().contiguous()
        return tensors, made.values

    return store


def store_int8(group: int, symmetric: bool = True, scale: torch.dtype = torch.bfloat16) -> Callable[[Tensor], Matrix]:
    """compressed-tensors int-quantized: signed bytes."""

    def store(weight: Tensor) -> Matrix:
        made = integer_codes(weight, 8, group, symmetric, scale)
        tensors = {".weight": (made.codes.int() - 128).to(torch.int8), ".weight_scale": made.scales}
        if not symmetric:
            tensors[".weight_zero_point"] = (made.zeros.int() - 128).to(torch.int8)
        return tensors, made.values

    return store


def fp4_bytes(weight: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """(two codes of e2m1 a byte, the first one low; their values in float64): the nearest. `scales`: [out, in]."""
    table = torch.tensor(FP4_VALUES, dtype=torch.float64)
    scaled = (weight.double() / scales).nan_to_num()
    codes = torch.bucketize(scaled.abs(), (table[1:] + table[:-1]) / 2)  # the lower one of two that are as near
    values = table[codes] * torch.where(scaled < 0, -1.0, 1.0)
    codes = (codes | (scaled < 0).long() << 3).to(torch.uint8)
    return codes[:, 0::2] | codes[:, 1::2] << 4, values


def exponents_of(weight: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """(exponents and 127 [out, in / 32] in uint8, the scales [out, in]) that bring the largest of a group to `largest`
    at most."""
    groups = weight.double().unflatten(1, (-1, MX_GROUP)).abs().amax(-1)
    powers = (groups / largest).log2().ceil().clamp(-100, 90)
    return (powers + 127).to(torch.uint8), powers.exp2().repeat_interleave(MX_GROUP, 1)


def store_nvfp4(modelopt: bool) -> Callable[[Tensor], Matrix]:
    """e2m1 with a scale in e4m3 for 16 columns, and one of the matrix: a factor (ModelOpt), or a divisor."""

    def store(weight: Tensor) -> Matrix:
        factor = weight.float().abs().max() / (6 * FP8_LARGEST)
        groups = weight.float().unflatten(1, (-1, NVFP4_GROUP)).abs().amax(-1)
        scales = (groups / 6 / factor).clamp(max=FP8_LARGEST).to(torch.float8_e4m3fn)
        wide = scales.double().repeat_interleave(NVFP4_GROUP, 1)
        codes, values = fp4_bytes(weight, wide * factor.double())
        exact = values * wide * factor.double()
        if modelopt:
            return {".weight": codes, ".weight_scale": scales, ".weight_scale_2": factor}, exact
        divisor = (1 / factor).reshape(1)
        exact = values * wide * (1 / divisor).double()
        return {".weight_packed": codes, ".weight_scale": scales, ".weight_global_scale": divisor}, exact

    return store


def store_mxfp4(weight: Tensor) -> Matrix:
    exponents, scales = exponents_of(weight, 6)
    codes, values = fp4_bytes(weight, scales)
    return {".weight_packed": codes, ".weight_scale": exponents}, values * scales


def store_mxfp8(scale_name: str) -> Callable[[Tensor], Matrix]:
    def store(weight: Tensor) -> Matrix:
        exponents, scales = exponents_of(weight, FP8_LARGEST)
        codes = (weight.double() / scales).float().to(torch.float8_e4m3fn)
        return {".weight": codes, scale_name: exponents}, codes.double() * scales

    return store


def store_gptq(bits: int, group: int, symmetric: bool, stored_less: int) -> Callable[[Tensor], Matrix]:
    """GPTQ: transposed, packed along the input; zeros packed along the output, in version 1 less one."""

    def store(weight: Tensor) -> Matrix:
        made = integer_codes(weight, bits, group, symmetric, torch.float16)
        return {
            ".qweight": packed_words(made.codes, bits).t().contiguous(),
            ".qzeros": packed_words((made.zeros - stored_less).t(), bits),
            ".scales": made.scales.t().contiguous(),
            ".g_idx": (torch.arange(weight.shape[1]) // (group or weight.shape[1])).int(),
        }, made.values

    return store


def store_awq(group: int) -> Callable[[Tensor], Matrix]:
    """AWQ, version "gemm": transposed, packed along the output, eight columns interleaved."""

    def interleaved(codes: Tensor) -> Tensor:
        return packed_words(codes.view(codes.shape[0], -1, 8)[:, :, list(AWQ_ORDER)].flatten(1), 4)

    def store(weight: Tensor) -> Matrix:
        made = integer_codes(weight, 4, group, False, torch.float16)
        return {
            ".qweight": interleaved(made.codes.t().contiguous()),
            ".qzeros": interleaved(made.zeros.t().contiguous()),
            ".scales": made.scales.t().contiguous(),
        }, made.values

    return store


def compressed_config(layout: str, bits: int, group: int, symmetric: bool = True, kind: str = "int") -> dict[str, Any]:
    weights = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": group or None,
        "num_bits": bits,
        "observer": "minmax",
        "strategy": "group" if group else "channel",
        "symmetric": symmetric,
        "type": kind,
    }
    return {
        "config_groups": {"group_0": {"input_activations": None, "targets": ["Linear"], "weights": weights}},
        "format": layout,
        "ignore": ["lm_head", "re:.*self_attn.*"],
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def micro_config(layout: str, bits: int, group: int, strategy: str) -> dict[str, Any]:
    """compressed-tensors' floats with a scale for a few columns, as llm-compressor writes it."""
    config = compressed_config(layout, bits, group, kind="float")
    config["config_groups"]["group_0"]["weights"]["strategy"] = strategy
    return config


def gptq_config(bits: int, group: int, symmetric: bool, **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group or -1,
        "desc_act": False,
        "sym": symmetric,
        "damp_percent": 0.1,
        **more,
    }


FP8_CONFIG = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
}
MODELOPT_CONFIG = {
    "config_groups": {
        "group_0": {
            "input_activations": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": NVFP4_GROUP},
            "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": NVFP4_GROUP},
            "targets": ["Linear"],
        }
    },
    "ignore": ["lm_head"],
    "quant_algo": "NVFP4",
    "producer": {"name": "modelopt", "version": "0.39.0"},
    "quant_method": "modelopt",
}
AWQ_CONFIG = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}


def _packed(name: str, bits: int, group: int, symmetric: bool = True) -> Scheme:
    return Scheme(
        name, store_packed(bits, group, symmetric), compressed_config("pack-quantized", bits, group, symmetric)
    )


def _int8(name: str, group: int, symmetric: bool = True, scale: torch.dtype = torch.bfloat16) -> Scheme:
    return Scheme(name, store_int8(group, symmetric, scale), compressed_config("int-quantized", 8, group, symmetric))


def _gptq(name: str, bits: int, group: int, symmetric: bool = True, version: int = 1) -> Scheme:
    more = {"checkpoint_format": "gptq_v2"} if version == 2 else {}
    return Scheme(name, store_gptq(bits, group, symmetric, 2 - version), gptq_config(bits, group, symmetric, **more))


SCHEMES: dict[str, Scheme] = {
    "bf16": Scheme("bf16", store_bf16),
    "bf16_fused": Scheme("bf16", store_bf16, fused=True),
    "fp8": Scheme("fp8_e4m3_g128", store_fp8, FP8_CONFIG),
    "fp8_fused": Scheme("fp8_e4m3_g128", store_fp8, FP8_CONFIG, fused=True),
    "fp8_channel": Scheme("fp8_e4m3", store_fp8_channel, compressed_config("float-quantized", 8, 0, kind="float")),
    "int4_g32": _packed("int4_g32", 4, 32),
    "int4_g128": _packed("int4_g128", 4, 128),
    "int4_g32_zp": _packed("int4_g32_zp", 4, 32, symmetric=False),
    "int4_channel": _packed("int4", 4, 0),
    "int4_channel_zp": _packed("int4_g128_zp", 4, 0, symmetric=False),
    "int8_packed": _packed("int8", 8, 0),
    "int8_packed_g32_zp": _packed("int8_g32_zp", 8, 32, symmetric=False),
    "int8": _int8("int8", 0),
    "int8_float32_scales": _int8("int8", 0, scale=torch.float32),
    "int8_g128": _int8("int8_g128", 128),
    "int8_g128_zp": _int8("int8_g128_zp", 128, symmetric=False),
    "gptq_int4_g32": _gptq("int4_g32", 4, 32),
    "gptq_int4_g128": _gptq("int4_g128", 4, 128),
    "gptq_int4_g128_zp": _gptq("int4_g128_zp", 4, 128, symmetric=False),
    "gptq_v2_int4_g64_zp": _gptq("int4_g64_zp", 4, 64, symmetric=False, version=2),
    "gptq_int4_channel": _gptq("int4", 4, 0),
    "gptq_int4_channel_zp": _gptq("int4_g128_zp", 4, 0, symmetric=False),
    "gptq_int8_g128": _gptq("int8_g128", 8, 128),
    "gptq_int8_g32_zp": _gptq("int8_g32_zp", 8, 32, symmetric=False),
    "fp8_naive": Scheme("fp8_e4m3", store_fp8_channel, compressed_config("naive-quantized", 8, 0, kind="float")),
    "nvfp4": Scheme(
        "nvfp4_g16", store_nvfp4(False), micro_config("nvfp4-pack-quantized", 4, NVFP4_GROUP, "tensor_group")
    ),
    "nvfp4_modelopt": Scheme("nvfp4_g16", store_nvfp4(True), MODELOPT_CONFIG),
    "mxfp4": Scheme("mxfp4_g32", store_mxfp4, micro_config("mxfp4-pack-quantized", 4, MX_GROUP, "group")),
    "mxfp8": Scheme("mxfp8_g32", store_mxfp8(".weight_scale"), micro_config("mxfp8-quantized", 8, MX_GROUP, "group")),
    "mxfp8_method": Scheme(
        "mxfp8_g32", store_mxfp8(".weight_scale_inv"), {"quant_method": "mxfp8", "activation_scheme": "dynamic"}
    ),
    "awq_g32": Scheme("int4_g32_zp", store_awq(32), {**AWQ_CONFIG, "group_size": 32}),
    "awq_g128": Scheme("int4_g128_zp", store_awq(128), {**AWQ_CONFIG, "group_size": 128}),
}
DISTINCT = [  # one of each kind of numbers, scales and zero points
    "bf16",
    "fp8",
    "fp8_channel",
    "int8",
    "int8_g128_zp",
    "int4_g32",
    "int4_g128",
    "awq_g128",
    "gptq_int8_g32_zp",
    "nvfp4",
    "mxfp8",
]


def checkpoint_tensors(
    experts: ReferenceExperts, scheme: str, prefix: str
) -> tuple[dict[str, Tensor], ReferenceExperts]:
    """The tensors below `prefix` as a checkpoint has them, and the float64 weights that they stand for."""
    made = SCHEMES[scheme]
    if made.fused:
        return _fused_tensors(experts, made, prefix)
    tensors: dict[str, Tensor] = {}
    values: dict[str, list[Tensor]] = {part: [] for part in PROJECTIONS.values()}
    for name, part in PROJECTIONS.items():
        for e, weight in enumerate(getattr(experts, part)):
            stored, exact = made.store(weight)
            tensors |= {f"{prefix}.{e}.{name}{suffix}": tensor for suffix, tensor in stored.items()}
            values[part].append(exact)
    gate, up, down = (torch.stack(values[part]) for part in ("gate", "up", "down"))
    return tensors, ReferenceExperts(gate, up, down)


def _fused_tensors(experts: ReferenceExperts, made: Scheme, prefix: str) -> tuple[dict[str, Tensor], ReferenceExperts]:
    """As transformers 5 saves them: gate over up, the scales of fp8 under `..._scale_inv`."""
    tensors: dict[str, Tensor] = {}
    both = torch.cat([experts.gate, experts.up], dim=1)
    values = []
    for name, stacked in (("gate_up_proj", both), ("down_proj", experts.down)):
        stored = [made.store(weight) for weight in stacked]
        for suffix in stored[0][0]:
            key = f"{prefix}.{name}{suffix.removeprefix('.weight')}"
            tensors[key] = torch.stack([matrix[suffix] for matrix, _ in stored])
        values.append(torch.stack([exact for _, exact in stored]))
    gate, up = values[0].chunk(2, dim=1)
    return tensors, ReferenceExperts(gate.contiguous(), up.contiguous(), values[1])


def write_config(directory: Path, scheme: str, config: Mapping[str, Any] | None = None) -> None:
    """config.json: `config` with the scheme's quantization_config."""
    quantization = SCHEMES[scheme].config
    more = {} if quantization is None else {"quantization_config": quantization}
    (directory / "config.json").write_text(json.dumps({**(config or {}), **more}))


def write_checkpoint(
    directory: Path,
    layers: Mapping[str, ReferenceExperts],
    scheme: str,
    config: Mapping[str, Any] | None = None,
) -> dict[str, ReferenceExperts]:
    """model.safetensors and config.json with the experts of each prefix; returns their exact values by prefix."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, ReferenceExperts] = {}
    for prefix, experts in layers.items():
        stored, values[prefix] = checkpoint_tensors(experts, scheme, prefix)
        tensors |= stored
    save_file(tensors, directory / "model.safetensors")
    write_config(directory, scheme, config)
    return values
