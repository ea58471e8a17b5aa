"""Dequantizes matrices outside the routed experts while a checkpoint is read.

    W[row, col] = scale[row, col / group] * (code - zero[row, col / group])

`kt_runtime.families.quantization` describes how each method stores codes, scales and zeros. This module detects the
method from the tensors' names, types and shapes. Arithmetic is float32, rounded once. Only one matrix and its codes are
in memory at a time. Scales may be in another file than the codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from math import ceil
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from kt_runtime.errors import CheckpointError

FP8_BLOCK = 128
ROWS_AT_ONCE = 256
ELEMENTS_AT_ONCE = 1 << 22
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Order of nibbles in an AWQ word: column i of eight is in nibble AWQ_ORDER[i]."""

PLAIN = (torch.bfloat16, torch.float16, torch.float32)
PARTS = {
    "weight_packed": (
        *("weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"),
        *("weight_global_scale", "input_global_scale"),
    ),
    "qweight": ("scales", "qzeros", "g_idx"),
    "weight": ("weight_scale_inv", "weight_scale", "weight_scale_2", "weight_zero_point", "input_scale"),
}
"""Last part of the codes' name → last parts of the names of the matrix's other tensors; not all need exist."""
EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)
MX_GROUP, NVFP4_GROUP, MOST_EXPONENT = 32, 16, 226  # 2^99: below 1e30, as for the experts' scales
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of e2m1 by the code without its sign, the highest bit (OCP Microscaling formats, 1.0)."""
CODES = tuple(f".{name}" for name in PARTS)


def plain_tensors(
    files: Iterable[str],
    dtype: torch.dtype,
    is_wanted: Callable[[str], bool] = lambda name: True,
    *,
    gptq_zero_offset: int = 1,
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of a checkpoint as if it had never been quantized, in the order of the files.

    A quantized matrix is yielded as `NAME.weight` [out, in] of `dtype`; other tensors as stored. Tensors whose name is
    not `is_wanted` are skipped. `gptq_zero_offset`: GPTQ's true zeros minus the stored ones, 0 in GPTQ's second
    version. Raises CheckpointError for a quantized matrix of no known method, and for NaN or infinity.
    """
    files = list(files)
    places: dict[str, str] = {}
    for file in files:
        with safe_open(file, framework="pt", device="cpu") as opened:
            places.update(dict.fromkeys((name for name in opened.keys() if is_wanted(name)), file))  # noqa: SIM118
    for file in files:
        with safe_open(file, framework="pt", device="cpu") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                if places.get(name) != file or _is_part(name, places):
                    continue
                parts = _parts(name, places)
                codes = opened.get_tensor(name)
                if not parts and (codes.dtype in PLAIN or not name.endswith(CODES)):
                    _check_finite(codes, file, name)
                    yield name, codes
                    continue
                module = name.rpartition(".")[0]
                tensors = {part: _read(f"{module}.{part}", places[f"{module}.{part}"], opened, file) for part in parts}
                for part, tensor in tensors.items():
                    _check_finite(tensor, places[f"{module}.{part}"], f"{module}.{part}")
                try:
                    weight = dequantized(codes, tensors, dtype, gptq_zero_offset)
                except (ValueError, RuntimeError) as error:
                    raise CheckpointError(f"{file}: {name!r} can't be dequantized: {error}") from error
                _check_finite(weight, file, name)
                yield f"{module}.weight", weight


def _check_finite(tensor: Tensor, file: str, name: str) -> None:
    """Raises CheckpointError for NaN or infinity. Checks some elements at a time, since the mask takes memory too."""
    if not tensor.is_floating_point():
        return
    for index, some in enumerate(tensor.reshape(-1).split(ELEMENTS_AT_ONCE)):
        bad = ~torch.isfinite(some.float() if some.dtype.itemsize == 1 else some)
        if bad.any():
            element = index * ELEMENTS_AT_ONCE + int(bad.nonzero()[0])
            raise CheckpointError(f"{file}: {name!r} holds NaN or Inf at element {element}")


def dequantized(codes: Tensor, parts: Mapping[str, Tensor], dtype: torch.dtype, gptq_zero_offset: int = 1) -> Tensor:
    """The matrix [out, in] that `codes` and `parts` (keyed by the last part of their names) store.

    Raises ValueError for a combination of names, types and shapes that no method uses.
    """
    if codes.dtype == torch.uint8 and "weight_scale" in parts:
        return from_fp4(codes, parts, dtype)
    for name in ("weight_scale_inv", "weight_scale"):
        if codes.dtype == torch.float8_e4m3fn and name in parts and parts[name].dtype in EXPONENTS:
            return from_mxfp8(codes, parts[name], dtype)
    if "weight_scale_inv" in parts:
        return from_fp8(codes, parts["weight_scale_inv"], dtype)
    if {"weight_shape", "weight_scale"} <= set(parts):
        return from_packed(codes, parts, dtype)
    if "weight_scale" in parts:
        if codes.dtype == torch.float8_e4m3fn and parts["weight_scale"].shape != (codes.shape[0], 1):
            return from_fp8(codes, parts["weight_scale"], dtype)
        return from_bytes(codes, parts["weight_scale"], parts.get("weight_zero_point"), dtype)
    if {"scales", "qzeros"} <= set(parts):
        if codes.shape[1] == parts["scales"].shape[1]:
            return from_gptq(codes, parts, dtype, gptq_zero_offset)
        return from_awq(codes, parts, dtype)
    raise ValueError(f"beside it are only {', '.join(sorted(parts)) or 'no scales'}")


def from_fp8(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """DeepSeek-V3's fp8: e4m3 codes [out, in], each times the scale of its 128x128 block."""
    rows, cols = codes.shape
    _check_shape("the scales' tensor", scales, ceil(rows / FP8_BLOCK), ceil(cols / FP8_BLOCK))
    if codes.dtype != torch.float8_e4m3fn:
        raise ValueError(f"dtype is {codes.dtype}, expected torch.float8_e4m3fn")
    out = torch.empty(rows, cols, dtype=dtype)
    columns = torch.arange(cols) // FP8_BLOCK
    for block, scale in enumerate(scales.float()):
        some = slice(block * FP8_BLOCK, (block + 1) * FP8_BLOCK)
        out[some] = codes[some].float() * scale[columns]
    return out


def from_bytes(codes: Tensor, scales: Tensor, zeros: Tensor | None, dtype: torch.dtype) -> Tensor:
    """compressed-tensors `int-quantized` (int8) and `float-quantized` (e4m3): [out, in], scales [out, groups]."""
    rows, cols = codes.shape
    group = _group(cols, scales.shape[1])
    _check_shape("weight_scale", scales, rows, cols // group)
    if codes.dtype not in (torch.int8, torch.float8_e4m3fn):
        raise ValueError(f"dtype is {codes.dtype}, expected torch.int8 or torch.float8_e4m3fn")
    columns = torch.arange(cols) // group

    def some_rows(some: slice) -> Tensor:
        values = codes[some].float()
        if zeros is not None:
            values.sub_(zeros[some].float()[:, columns])
        return values.mul_(scales[some].float()[:, columns])

    return _by_rows(rows, cols, dtype, some_rows)


def from_mxfp8(codes: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """MXFP8: e4m3 codes [out, in], and 2^(exponent - 127) for 32 columns."""
    rows, cols = codes.shape
    _check_shape("the scales' tensor", exponents, rows, cols // MX_GROUP)
    scales, columns = powers_of_two(exponents), torch.arange(cols) // MX_GROUP
    return _by_rows(rows, cols, dtype, lambda some: codes[some].float().mul_(scales[some][:, columns]))


def from_fp4(codes: Tensor, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """NVFP4 and MXFP4: two codes of e2m1 a byte, the first one low.

    NVFP4 has a scale in e4m3 for 16 columns and one for the matrix, which compressed-tensors (`weight_global_scale`)
    divides by and ModelOpt (`weight_scale_2`) multiplies with. MXFP4 has an exponent for 32 columns.
    """
    rows, cols = codes.shape[0], 2 * codes.shape[1]
    stored, factor = parts["weight_scale"], torch.ones(1)
    if stored.dtype in EXPONENTS:
        group, scales = MX_GROUP, powers_of_two(stored)
    else:
        group, scales = NVFP4_GROUP, stored.float()
        if stored.dtype != torch.float8_e4m3fn or (scales < 0).any():
            raise ValueError(f"weight_scale is {stored.dtype} or has negative numbers, expected positive e4m3")
        factor = _of_matrix(parts)
    _check_shape("weight_scale", scales, rows, cols // group)
    values = torch.tensor(FP4_VALUES + tuple(-value for value in FP4_VALUES))
    columns = torch.arange(cols) // group

    def some_rows(some: slice) -> Tensor:
        nibbles = torch.stack([codes[some] & 15, codes[some] >> 4], -1).flatten(1)
        return values[nibbles.int()].mul_(scales[some][:, columns]).mul_(factor)

    return _by_rows(rows, cols, dtype, some_rows)


def powers_of_two(exponents: Tensor) -> Tensor:
    """2^(exponent - 127) in float32; 0 for 0. Raises ValueError for a power that overflows, or 255, which is NaN."""
    codes = exponents.view(torch.uint8).int()
    if (codes > MOST_EXPONENT).any():
        raise ValueError(f"an exponent is {int(codes.max())}; allowed: up to {MOST_EXPONENT}")
    return (codes << 23).view(torch.float32)


def _of_matrix(parts: Mapping[str, Tensor]) -> Tensor:
    """Scale of a whole NVFP4 matrix, as a factor: [1]."""
    found = next((name for name in ("weight_global_scale", "weight_scale_2") if name in parts), None)
    if found is None:
        raise ValueError("beside it is no scale of the matrix: neither weight_global_scale nor weight_scale_2")
    scale = parts[found].float().reshape(-1)
    if len(scale) != 1 or not 0 < scale < float("inf"):
        raise ValueError(f"{found} is {scale.tolist()[:3]}, expected one number above 0")
    return 1 / scale if found == "weight_global_scale" else scale


def from_packed(codes: Tensor, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """compressed-tensors `pack-quantized`: signed codes plus 2^(bits - 1), packed along the columns."""
    if "weight_g_idx" in parts:
        raise ValueError("its columns are in another order (weight_g_idx), which this version can't use")
    rows, cols = (int(size) for size in parts["weight_shape"])
    scales = parts["weight_scale"].float()
    bits = _bits(codes.shape[1], cols)
    group = _group(cols, scales.shape[1])
    if codes.shape[0] != rows:
        raise ValueError(f"shape is {list(codes.shape)}, but by weight_shape {[rows, cols]}")
    _check_shape("weight_scale", scales, rows, cols // group)
    zeros = torch.full((rows, scales.shape[1]), float(2 ** (bits - 1)))
    if "weight_zero_point" in parts:
        zeros = unpacked(parts["weight_zero_point"].T, bits)[:, :rows].T.float()
    columns = torch.arange(cols) // group

    def some_rows(some: slice) -> Tensor:
        values = unpacked(codes[some], bits)[:, :cols].float()
        return values.sub_(zeros[some][:, columns]).mul_(scales[some][:, columns])

    return _by_rows(rows, cols, dtype, some_rows)


def from_gptq(codes: Tensor, parts: Mapping[str, Tensor], dtype: torch.dtype, zero_offset: int = 1) -> Tensor:
    """GPTQ: codes packed along W's columns and stored transposed; stored qzeros = zeros - `zero_offset`."""
    scales, rows = parts["scales"].float(), codes.shape[1]
    bits = _bits(parts["qzeros"].shape[1], rows)
    cols = codes.shape[0] * (32 // bits)
    group = _group(cols, scales.shape[0])
    zeros = ((unpacked(parts["qzeros"], bits)[:, :rows] + zero_offset) & (2**bits - 1)).float()
    _check_order(parts.get("g_idx"), cols, group)
    columns = torch.arange(cols) // group

    def some_rows(some: slice) -> Tensor:
        values = unpacked(codes[:, some].T, bits).float()
        return values.sub_(zeros[:, some].T[:, columns]).mul_(scales[:, some].T[:, columns])

    return _by_rows(rows, cols, dtype, some_rows)


def from_awq(codes: Tensor, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """AWQ (`gemm`): stored transposed; a word packs eight rows of W in the order 0 2 4 6 1 3 5 7."""
    scales, cols = parts["scales"].float(), codes.shape[0]
    rows = scales.shape[1]
    _check_shape("qweight", codes, cols, ceil(rows / 8))
    group = _group(cols, scales.shape[0])
    zeros = unpacked(parts["qzeros"], 4, AWQ_ORDER)[:, :rows].float()
    columns = torch.arange(cols) // group

    def some_words(some: slice) -> Tensor:
        values = unpacked(codes[:, some.start // 8 : ceil(some.stop / 8)], 4, AWQ_ORDER).T[: some.stop - some.start]
        return values.float().sub_(zeros[:, some].T[:, columns]).mul_(scales[:, some].T[:, columns])

    return _by_rows(rows, cols, dtype, some_words)


def unpacked(words: Tensor, bits: int, order: Iterable[int] | None = None) -> Tensor:
    """int32 words [N, M] -> unsigned codes uint8 [N, M * 32 / bits], lowest bits first, or in `order` if given."""
    places = torch.arange(32 // bits) if order is None else torch.tensor(list(order))
    shifted = words.unsqueeze(-1).bitwise_right_shift((places * bits).to(torch.int32))
    return shifted.bitwise_and_(2**bits - 1).to(torch.uint8).flatten(1)


def _by_rows(rows: int, cols: int, dtype: torch.dtype, values: Callable[[slice], Tensor]) -> Tensor:
    out = torch.empty(rows, cols, dtype=dtype)
    for start in range(0, rows, ROWS_AT_ONCE):
        some = slice(start, min(start + ROWS_AT_ONCE, rows))
        out[some] = values(some)
    return out


def _is_part(name: str, places: Mapping[str, str]) -> bool:
    module, _, last = name.rpartition(".")
    return any(last in parts and f"{module}.{codes}" in places for codes, parts in PARTS.items())


def _parts(name: str, places: Mapping[str, str]) -> list[str]:
    module, _, last = name.rpartition(".")
    return [part for part in PARTS.get(last, ()) if f"{module}.{part}" in places]


def _read(name: str, place: str, opened: Any, file: str) -> Any:
    if place == file:
        return opened.get_tensor(name)
    with safe_open(place, framework="pt", device="cpu") as other:
        return other.get_tensor(name)


def _bits(words: int, codes: int) -> int:
    for bits in (4, 8):
        if words == ceil(codes * bits / 32):
            return bits
    raise ValueError(f"{words} words hold {codes} codes of neither 4 nor 8 bits")


def _group(cols: int, num_groups: int) -> int:
    """Group size: number of columns that share a scale."""
    if num_groups < 1 or cols % num_groups:
        raise ValueError(f"{cols} columns are not {num_groups} groups of one size")
    return cols // num_groups


def _check_order(g_idx: Tensor | None, cols: int, group: int) -> None:
    if g_idx is not None and not torch.equal(g_idx.long(), torch.arange(cols) // group):
        raise ValueError("its columns are in another order (g_idx), which this version can't use")


def _check_shape(name: str, tensor: Tensor, *shape: int) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {list(tensor.shape)}, expected {list(shape)}")
