"""Writes a checkpoint of one layer in a published model's format, quantized as published checkpoints are.

The file is written tensor by tensor, so it is never held in memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kt_runtime.bench.experts import small_floats
from kt_runtime.bench.experts.gguf_blocks import write_layer
from kt_runtime.bench.experts.layer_case import Weights
from kt_runtime.bench.experts.plan import ENCODINGS, Encoding
from kt_runtime.errors import InvalidValueError

PREFIX = "model.layers.0.mlp.experts"
DTYPES = {
    torch.bfloat16: ("BF16", 2),
    torch.float32: ("F32", 4),
    torch.float8_e4m3fn: ("F8_E4M3", 1),
    torch.int8: ("I8", 1),
    torch.uint8: ("U8", 1),
    torch.int32: ("I32", 4),
    torch.int64: ("I64", 8),
}
FP8_BLOCK = 128
FP8_LARGEST = 448.0  # of e4m3

Named = dict[str, Tensor]


def write_checkpoint(directory: Path, encoding: str, weights: Weights) -> None:
    """`encoding`: one of ENCODINGS. The directory must exist. The experts' prefix is `prefix(encoding)`."""
    how = ENCODINGS[encoding]
    if how.gguf:
        write_layer(directory / "model.gguf", how.gguf, weights)
        files = [str(directory / "model.gguf")]
        stated = {"quantization_config": {"quant_method": "gguf", "files": files}}
        (directory / "config.json").write_text(json.dumps(stated))
        return
    config = _quantization_config(encoding, how)
    (directory / "config.json").write_text(json.dumps({"quantization_config": config} if config else {}))
    encode = _encoder(encoding, how)
    num_experts = weights.down.shape[0]
    shapes = {name: (t.dtype, tuple(t.shape)) for name, t in _expert_tensors(weights, 0, encode).items()}
    with (directory / "model.safetensors").open("wb") as file:
        file.write(_header(shapes, num_experts))
        for expert in range(num_experts):
            for tensor in _expert_tensors(weights, expert, encode).values():
                file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)


def prefix(encoding: str) -> str:
    return "blk.0" if ENCODINGS[encoding].gguf else PREFIX


def _expert_tensors(weights: Weights, expert: int, encode: Callable[[Tensor], Named]) -> Named:
    """One expert's tensors, named without the expert: "gate_proj.weight"."""
    matrices = {
        f"{projection}.{suffix}": tensor
        for projection, matrix in weights.expert(expert).items()
        for suffix, tensor in encode(matrix).items()
    }
    return matrices | {f"{projection}.bias": bias for projection, bias in weights.biases(expert).items()}


def _encoder(encoding: str, how: Encoding) -> Callable[[Tensor], Named]:
    if encoding == "bf16":
        return lambda matrix: {"weight": matrix}
    if encoding == "fp8":
        return lambda matrix: dict(zip(("weight", "weight_scale_inv"), to_fp8_blocks(matrix), strict=True))
    if encoding in small_floats.ENCODERS:
        return small_floats.ENCODERS[encoding]
    return lambda matrix: _compressed(matrix, how)


def _compressed(matrix: Tensor, how: Encoding) -> Named:
    codes, scales, zeros = to_integers(matrix, how.bits, how.group or matrix.shape[1], how.zero_points)
    if how.bits == 8:
        return {"weight": codes, "weight_scale": scales}
    tensors = {"weight_packed": pack_words(codes, how.bits), "weight_scale": scales}
    tensors["weight_shape"] = torch.tensor(matrix.shape, dtype=torch.int64)
    if zeros is not None:
        tensors["weight_zero_point"] = pack_words(zeros.t(), how.bits).t()
    return tensors


def _quantization_config(encoding: str, how: Encoding) -> dict[str, Any] | None:
    if encoding == "bf16":
        return None
    if encoding == "fp8":
        block = [FP8_BLOCK, FP8_BLOCK]
        return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": block}
    if encoding in small_floats.ENCODERS:
        return small_floats.quantization_config(encoding)
    weights: dict[str, Any] = {"num_bits": how.bits, "type": "int", "symmetric": not how.zero_points}
    weights |= {"strategy": "group", "group_size": how.group} if how.group else {"strategy": "channel"}
    layout = "pack-quantized" if how.bits == 4 else "int-quantized"
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups}


def _header(shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]], num_experts: int) -> bytes:
    """Eight bytes little-endian length, then JSON padded with spaces to a multiple of eight (safetensors format)."""
    header, offset = {}, 0
    for name, dtype, shape in _all_names(shapes, num_experts):
        code, size = DTYPES[dtype]
        end = offset + size * math.prod(shape)
        header[name] = {"dtype": code, "shape": shape, "data_offsets": (offset, end)}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded


def _all_names(
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]], num_experts: int
) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
    for expert in range(num_experts):
        for name, (dtype, shape) in shapes.items():
            yield f"{PREFIX}.{expert}.{name}", dtype, shape


# Quantization of a matrix [rows, cols]: rounding to nearest, scales from the extremes.


def to_fp8_blocks(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 values and a float32 scale per block of 128 x 128: matrix = values * scale. DeepSeek-V3's format."""
    rows, cols = matrix.shape
    padding = (0, -cols % FP8_BLOCK, 0, -rows % FP8_BLOCK)
    blocks = torch.nn.functional.pad(matrix.float(), padding).unflatten(0, (-1, FP8_BLOCK))
    blocks = blocks.unflatten(2, (-1, FP8_BLOCK))
    scales = blocks.abs().amax((1, 3)).clamp_min(1e-30) / FP8_LARGEST
    values = (blocks / scales[:, None, :, None]).flatten(2).flatten(0, 1)[:rows, :cols]
    return values.contiguous().to(torch.float8_e4m3fn), scales


def to_integers(matrix: Tensor, bits: int, group: int, zero_points: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Signed codes [rows, cols], scales bfloat16 and zeros [rows, cols / group]: matrix = scale * (code - zero)."""
    rows, cols = matrix.shape
    if cols % group:
        raise InvalidValueError(f"a matrix of {rows} x {cols} has no groups of {group} columns")
    grouped = matrix.float().unflatten(1, (-1, group))
    lowest, highest = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    if zero_points:
        low, high = grouped.amin(2).clamp_max(0), grouped.amax(2).clamp_min(0)
        scales = ((high - low).clamp_min(1e-30) / (highest - lowest)).bfloat16()
        zeros = (lowest - low / scales.float()).round().clamp(lowest, highest).to(torch.int8)
        shifted = grouped / scales.float()[..., None] + zeros[..., None]
    else:
        scales = (grouped.abs().amax(2).clamp_min(1e-30) / highest).bfloat16()
        zeros, shifted = None, grouped / scales.float()[..., None]
    codes = shifted.round().clamp(lowest, highest).to(torch.int8)
    return codes.flatten(1), scales, zeros


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Signed codes [rows, cols] -> int32 [rows, cols * bits / 32]: adds 2^(bits - 1), first code in the lowest bits."""
    per_word = 32 // bits
    if codes.shape[1] % per_word:
        raise InvalidValueError(f"{codes.shape[1]} columns are no whole words of {per_word} codes")
    offset = (codes.to(torch.int64) + 2 ** (bits - 1)).unflatten(1, (-1, per_word))
    words = (offset << (torch.arange(per_word) * bits)).sum(2)
    return words.to(torch.int32)
