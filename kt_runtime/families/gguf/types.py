"""The types of a GGUF file's matrices, and the store's formats in which they are held packed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import ceil
from typing import Any

from kt_runtime.errors import CheckpointError
from kt_runtime.families.gguf.layout import EXPERT_TENSORS, expert_prefix

_PACKED: Mapping[str, tuple[str, int, int, int, int]] = {
    "BF16": ("bf16", 16, 0, 0, 0),
    "Q8_0": ("int8_g32", 8, 32, 2, 0),
    "Q4_0": ("int4_g32", 4, 32, 2, 0),
    "Q5_0": ("int5_g32", 5, 32, 2, 0),
    "MXFP4": ("mxfp4_g32", 4, 32, 1, 0),
    "Q4_K": ("int4k_g32", 4, 32, 1, 4),
    "Q5_K": ("int5k_g32", 5, 32, 1, 4),
    "Q6_K": ("int6k_g16", 6, 16, 1, 2),
    "IQ4_NL": ("iq4_g32", 4, 32, 2, 0),
    "IQ4_XS": ("iq4k_g32", 4, 32, 1, 2),
}
"""Type of experts → the store's format, bits of a code, columns of a group, bytes of its scale, bytes for 256 columns:
4 where groups have minima (csrc/kernels/layout.h)."""
EXPERT_TYPES: Collection[str] = tuple(_PACKED)
DENSE_TYPES: Collection[str] = tuple(kind for kind in _PACKED if kind != "BF16")
"""Types of linear layers' matrices that stay quantized."""


def packed_tensors(config: Mapping[str, Any]) -> Mapping[str, str]:
    """Hugging Face's name of each tensor of a linear layer that stays quantized on a CPU, and its type. `config`: the
    content of config.json, of any checkpoint."""
    settings = config.get("quantization_config") or {}
    dense = settings.get("dense") if settings.get("quant_method") == "gguf" else None
    return dense or {}


def packed_name(kind: str) -> str:
    """The store's name of the format in which experts of this type are held."""
    return _PACKED[kind][0]


def packed_bytes(kind: str, rows: int, cols: int) -> int:
    """Bytes of one matrix in the packed layout of csrc/kernels/layout.h. `cols`: whole blocks of the type."""
    _, bits, group, scale_bytes, super_bytes = _PACKED[kind]
    block_bytes = cols * 16 * bits // 8
    if group:
        groups, supers = cols // group, ceil(cols / 256)
        with_minima = 2 if super_bytes == 4 else 1
        block_bytes += 64 + with_minima * _lines(groups * 16 * scale_bytes)
        block_bytes += with_minima * _lines(supers * 32) if super_bytes else 0
    return ceil(rows / 16) * block_bytes


def _lines(size: int) -> int:
    return -(-size // 64) * 64


def expert_types(shapes_and_types: Mapping[str, str], layers: Collection[int], where: str) -> list[tuple[str, str]]:
    """The types (of gate and up, of down) of each layer's experts. `shapes_and_types`: type of each tensor.

    Raises CheckpointError for a missing tensor, and for a type that no kernel has.
    """
    return [_layer_types(shapes_and_types, layer, where) for layer in layers]


def _layer_types(types: Mapping[str, str], layer: int, where: str) -> tuple[str, str]:
    found = []
    for tensor in EXPERT_TENSORS:
        name = f"{expert_prefix(layer)}.{tensor}.weight"
        if f"{expert_prefix(layer)}.ffn_gate_up_exps.weight" in types:
            raise CheckpointError(
                f"{where}: layer {layer} has gate and up in one tensor, ffn_gate_up_exps; expected one for each: "
                "convert the model without --fuse-gate-up-exps"
            )
        if name not in types:
            raise CheckpointError(f"{where}: tensor {name!r} is missing: layer {layer} lacks experts")
        if types[name] not in EXPERT_TYPES:
            raise CheckpointError(
                f"{where}: tensor {name!r} has type {types[name]}; experts are served in {', '.join(EXPERT_TYPES)}"
            )
        found.append(types[name])
    gate, up, down = found
    if gate != up:
        raise CheckpointError(f"{where}: layer {layer}: gate is {gate} and up {up}; expected one type for both")
    if (gate == "BF16") != (down == "BF16"):
        raise CheckpointError(f"{where}: layer {layer}: gate is {gate} and down {down}; expected BF16 for all or none")
    return gate, down
