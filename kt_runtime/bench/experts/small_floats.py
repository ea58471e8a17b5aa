"""Matrices in compressed-tensors' formats of small floats: e4m3 by row, NVFP4, MXFP8.

Rounded to nearest, with scales from the extremes of each group. Layouts: csrc/weights/scheme.h.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

FP8_LARGEST = 448.0  # of e4m3
FP4_LARGEST = 6.0  # of e2m1
NVFP4_GROUP, MX_GROUP = 16, 32
_FP4_LIMITS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Midpoints between the values of e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6."""


def fp8_channel(matrix: Tensor) -> dict[str, Tensor]:
    """`float-quantized`: a scale for each row."""
    scales = (matrix.float().abs().amax(1, keepdim=True).clamp_min(1e-30) / FP8_LARGEST).bfloat16()
    return {"weight": _fp8(matrix.float() / scales.float()), "weight_scale": scales}


def nvfp4(matrix: Tensor) -> dict[str, Tensor]:
    """`nvfp4-pack-quantized`: a scale in e4m3 for 16 columns, divided by one of the matrix."""
    groups = matrix.float().unflatten(1, (-1, NVFP4_GROUP))
    largest = groups.abs().amax(2, keepdim=True)
    divisor = FP8_LARGEST * FP4_LARGEST / largest.max().clamp_min(1e-30)
    scales = _fp8(largest / FP4_LARGEST * divisor)
    scaled = (groups * divisor / scales.float().clamp_min(2.0**-9)).flatten(1)
    codes = torch.bucketize(scaled.abs(), torch.tensor(_FP4_LIMITS)) + 8 * (scaled < 0)
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
    return {"weight_packed": packed, "weight_scale": scales[:, :, 0], "weight_global_scale": divisor.reshape(1)}


def mxfp8(matrix: Tensor) -> dict[str, Tensor]:
    """`mxfp8-quantized`: a power of two for 32 columns."""
    groups = matrix.float().unflatten(1, (-1, MX_GROUP))
    powers = (groups.abs().amax(2, keepdim=True).clamp_min(1e-30) / FP8_LARGEST).log2().ceil()
    codes = _fp8(groups / powers.exp2()).flatten(1)
    return {"weight": codes, "weight_scale": (powers[:, :, 0] + 127).to(torch.uint8)}


def _fp8(values: Tensor) -> Tensor:
    return values.clamp(-FP8_LARGEST, FP8_LARGEST).to(torch.float8_e4m3fn)


ENCODERS: dict[str, Callable[[Tensor], dict[str, Tensor]]] = {
    "fp8_channel": fp8_channel,
    "nvfp4": nvfp4,
    "mxfp8": mxfp8,
}


def quantization_config(encoding: str) -> dict[str, Any]:
    """`quantization_config` of config.json, as llm-compressor writes it."""
    layout, weights = {
        "fp8_channel": ("float-quantized", {"num_bits": 8, "strategy": "channel"}),
        "nvfp4": ("nvfp4-pack-quantized", {"num_bits": 4, "strategy": "tensor_group", "group_size": NVFP4_GROUP}),
        "mxfp8": ("mxfp8-quantized", {"num_bits": 8, "strategy": "group", "group_size": MX_GROUP}),
    }[encoding]
    groups = {"group_0": {"targets": ["Linear"], "weights": {"type": "float", "symmetric": True, **weights}}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups}
