"""Writes a checkpoint of one layer in a published model's format.

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

from kt_runtime.bench.experts.formats import ENCODINGS, Encoding
from kt_runtime.bench.experts.quantization import FP8_BLOCK, pack_words, to_fp8_blocks, to_integers
from kt_runtime.bench.experts.weights import Weights

PREFIX = "model.layers.0.mlp.experts"
DTYPES = {
    torch.bfloat16: ("BF16", 2),
    torch.float32: ("F32", 4),
    torch.float8_e4m3fn: ("F8_E4M3", 1),
    torch.int8: ("I8", 1),
    torch.int32: ("I32", 4),
    torch.int64: ("I64", 8),
}

Named = dict[str, Tensor]


def write_checkpoint(directory: Path, encoding: str, weights: Weights) -> None:
    """`encoding`: one of ENCODINGS. The directory must exist."""
    how = ENCODINGS[encoding]
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


def _expert_tensors(weights: Weights, expert: int, encode: Callable[[Tensor], Named]) -> Named:
    """One expert's tensors, named without the expert: "gate_proj.weight"."""
    return {
        f"{projection}.{suffix}": tensor
        for projection, matrix in weights.expert(expert).items()
        for suffix, tensor in encode(matrix).items()
    }


def _encoder(encoding: str, how: Encoding) -> Callable[[Tensor], Named]:
    if encoding == "bf16":
        return lambda matrix: {"weight": matrix}
    if encoding == "fp8":
        return lambda matrix: dict(zip(("weight", "weight_scale_inv"), to_fp8_blocks(matrix), strict=True))
    return lambda matrix: _compressed(matrix, how)


def _compressed(matrix: Tensor, how: Encoding) -> Named:
    codes, scales, zeros = to_integers(matrix, how.bits, how.group, how.zero_points)
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
    weights = {"num_bits": how.bits, "type": "int", "strategy": "group", "group_size": how.group}
    weights["symmetric"] = not how.zero_points
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
