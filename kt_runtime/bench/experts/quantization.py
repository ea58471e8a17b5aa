"""Quantization of a matrix [rows, cols] as in published checkpoints: rounding to nearest, scales from the extremes."""

from __future__ import annotations

import torch
from torch import Tensor

from kt_runtime.errors import InvalidValueError

FP8_BLOCK = 128
FP8_LARGEST = 448.0  # of e4m3


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
