"""Matrices in GGUF's block types, and a GGUF file of one layer's experts.

The `gguf` package quantizes to Q8_0, Q4_0, Q5_0 and MXFP4. The K and IQ4 types are quantized here, by rounding to
nearest with scales from the extremes of each group; llama.cpp searches for better ones. Layouts:
csrc/weights/checkpoint/gguf_blocks.h.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from kt_runtime.bench.experts.layer_case import Weights
from kt_runtime.errors import InvalidValueError
from kt_runtime.gguf_file import BLOCKS

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
TENSORS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}


def to_blocks(values: Floats, kind: str) -> Bytes:
    """float32 [..., columns] -> bytes of the blocks [..., bytes of a row].

    Raises InvalidValueError for columns that are no whole blocks.
    """
    import gguf

    per_block, block_bytes = BLOCKS[kind]
    columns = values.shape[-1]
    if columns % per_block:
        raise InvalidValueError(f"{kind} has blocks of {per_block} weights; rows of {columns} are no whole blocks")
    if kind not in _OWN_TYPES:
        return np.asarray(gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind]), np.uint8)
    blocks = _OWN_TYPES[kind](values.reshape(-1, per_block))
    assert blocks.shape[1] == block_bytes
    return blocks.reshape(*values.shape[:-1], columns // per_block * block_bytes)


def write_layer(path: Path, kind: str, weights: Weights) -> None:
    """Writes the experts of a layer as those of `blk.0`."""
    num_experts = weights.down.shape[0]
    tensors: dict[str, tuple[str, Bytes | Floats]] = {}
    for projection in weights.expert(0):
        matrices = (weights.expert(expert)[projection] for expert in range(num_experts))
        stacked = np.stack([to_blocks(matrix.to(torch.float32).numpy(), kind) for matrix in matrices])
        tensors[f"blk.0.{TENSORS[projection]}.weight"] = kind, stacked
    for projection in weights.biases(0):
        biases = np.stack([weights.biases(expert)[projection].numpy() for expert in range(num_experts)])
        tensors[f"blk.0.{TENSORS[projection]}.bias"] = "F32", biases
    write_tensors(path, tensors)


def write_tensors(path: Path, tensors: Mapping[str, tuple[str, Bytes | Floats]]) -> None:
    """Writes a GGUF file without a model's keys. `tensors`: type and blocks [..., bytes of a row] by name."""
    import gguf

    writer = gguf.GGUFWriter(path, "experts")
    for name, (kind, blocks) in tensors.items():
        quantized = gguf.GGMLQuantizationType[kind]
        writer.add_tensor_info(name, blocks.shape, blocks.dtype, blocks.nbytes, quantized)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for _, blocks in tensors.values():
            writer.write_tensor_data(blocks)
    finally:
        writer.close()


def _halves(values: Floats) -> Bytes:
    """float16 [n, k] as bytes [n, 2 k]."""
    return values.astype("<f2").view(np.uint8)


def _pairs(blocks: Floats, highest: int) -> tuple[Bytes, Bytes]:
    """(the 16 bytes of factors, scales and minima; codes [n, 256]) of Q4_K and Q5_K."""
    groups = blocks.reshape(-1, 8, 32)
    least = np.maximum(-groups.min(2), 0)
    scale = np.maximum(groups.max(2) + least, 1e-20) / highest
    factor, least_factor = (_half(values.max(1, keepdims=True) / 63) for values in (scale, least))
    scales = np.clip(np.rint(scale / factor), 0, 63).astype(np.uint8)
    minima = np.clip(np.rint(least / least_factor), 0, 63).astype(np.uint8)
    step = np.maximum((factor * scales)[:, :, None], 1e-20)
    codes = np.clip(np.rint((groups + (least_factor * minima)[:, :, None]) / step), 0, highest)
    packed = np.empty((len(blocks), 12), np.uint8)
    packed[:, 0:4] = scales[:, :4] | (scales[:, 4:] >> 4) << 6
    packed[:, 4:8] = minima[:, :4] | (minima[:, 4:] >> 4) << 6
    packed[:, 8:12] = (scales[:, 4:] & 15) | (minima[:, 4:] & 15) << 4
    return np.hstack([_halves(factor), _halves(least_factor), packed]), codes.astype(np.uint8).reshape(-1, 256)


def _half(values: Floats) -> Floats:
    """Rounded to float16, and not zero."""
    return np.maximum(values, 1e-7).astype(np.float16).astype(np.float32)


def _nibbles(codes: Bytes) -> Bytes:
    """Low nibbles of 64 codes in 32 bytes: the first 32 low, the others high."""
    chunks = (codes & 15).reshape(-1, 4, 2, 32)
    return np.asarray(chunks[:, :, 0] | chunks[:, :, 1] << 4, np.uint8).reshape(-1, 128)


def _q4_k(blocks: Floats) -> Bytes:
    factors, codes = _pairs(blocks, 15)
    return np.hstack([factors, _nibbles(codes)])


def _q5_k(blocks: Floats) -> Bytes:
    factors, codes = _pairs(blocks, 31)
    bits = (codes >> 4).reshape(-1, 8, 32)
    high = np.bitwise_or.reduce(bits << np.arange(8, dtype=np.uint8)[None, :, None], 1)
    return np.hstack([factors, high, _nibbles(codes)])


def _q6_k(blocks: Floats) -> Bytes:
    groups = blocks.reshape(-1, 16, 16)
    scale = np.maximum(np.abs(groups).max(2), 1e-20) / 31
    factor = _half(scale.max(1, keepdims=True) / 127)
    scales = np.clip(np.rint(scale / factor), 1, 127)
    codes = np.clip(np.rint(groups / (factor * scales)[:, :, None]), -32, 31) + 32
    codes = codes.astype(np.uint8).reshape(-1, 2, 4, 32)
    low = np.stack([codes[:, :, 0] & 15 | (codes[:, :, 2] & 15) << 4, codes[:, :, 1] & 15 | (codes[:, :, 3] & 15) << 4])
    high = np.bitwise_or.reduce((codes >> 4) << (2 * np.arange(4, dtype=np.uint8))[None, None, :, None], 2)
    count = len(blocks)
    low_bytes = low.transpose(1, 2, 0, 3).reshape(count, 128)
    return np.hstack([low_bytes, high.reshape(count, 64), scales.astype(np.int8).view(np.uint8), _halves(factor)])


_IQ4 = np.array((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), np.float32)
_IQ4_LIMITS = (_IQ4[1:] + _IQ4[:-1]) / 2


def _iq4_scales(groups: Floats) -> Floats:
    """[n, k] of groups [n, k, 32]: what makes the number of the largest magnitude -127."""
    largest = np.take_along_axis(groups, np.abs(groups).argmax(2, keepdims=True), 2)[:, :, 0]
    return np.asarray(np.where(largest == 0, -1e-7, largest) / -127, np.float32)


def _iq4_codes(groups: Floats, scales: Floats) -> Bytes:
    """[n, k, 16]: the nearest of the 16 values, two a byte."""
    scaled = groups / np.where(scales == 0, 1e-20, scales)[:, :, None]
    codes = np.searchsorted(_IQ4_LIMITS, scaled).astype(np.uint8)
    return np.asarray(codes[:, :, :16] | codes[:, :, 16:] << 4, np.uint8)


def _iq4_nl(blocks: Floats) -> Bytes:
    groups = blocks.reshape(-1, 1, 32)
    scales = _iq4_scales(groups).astype(np.float16).astype(np.float32)
    return np.hstack([_halves(scales), _iq4_codes(groups, scales)[:, 0]])


def _iq4_xs(blocks: Floats) -> Bytes:
    groups = blocks.reshape(-1, 8, 32)
    wanted = _iq4_scales(groups)
    factor = _half(np.abs(wanted).max(1, keepdims=True) / 31)
    scales = np.clip(np.rint(wanted / factor), -32, 31)
    six = (scales + 32).astype(np.uint8)
    low = (six[:, 0::2] & 15) | (six[:, 1::2] & 15) << 4
    high = np.bitwise_or.reduce((six >> 4).astype(np.uint16) << (2 * np.arange(8, dtype=np.uint16)), 1)
    codes = _iq4_codes(groups, (factor * scales).astype(np.float32)).reshape(-1, 128)
    return np.hstack([_halves(factor), high[:, None].astype("<u2").view(np.uint8), low, codes])


_OWN_TYPES = {"Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs}
