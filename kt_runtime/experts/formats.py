"""Names of weight formats (csrc/kernels/format.h): encoding, group size (columns that share a scale), zero points.

bf16, fp8_e4m3_g128 (blocks of 128 x 128), int4_g32, int4_g128_zp, int8_g128, ... Names without a group size have one
scale per row: fp8_e4m3, int8, int4. mxfp8_g32 and mxfp4_g32 have exponents as scales, nvfp4_g16 e4m3; iq4 are GGUF's
16 values that are not evenly spaced. "k" after the encoding: scales are bytes with a float16 for 256 columns, as in
GGUF's K formats: int4k_g32 (Q4_K), int5k_g32, int6k_g16, iq4k_g32 (IQ4_XS). A layer whose down matrices have another
format names both: int4k_g32+int6k_g16.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kt_runtime.errors import UnknownNameError
from kt_runtime.families import gguf

QUANTIZE_FORMATS = ("int4", "int8")
"""Target formats for bf16 and fp8 checkpoints when loading: int4 has a scale per 32 columns, int8 one per row."""


@dataclass(frozen=True, slots=True)
class CheckpointFormat:
    """`method`: quant_method of config.json, with its format or algorithm; or "GGUF" with the type of the experts.
    `experts`: what `ExpertStore.format` says, where G is the number of columns that share a scale."""

    method: str
    weights: str
    experts: str


_COMPRESSED = "compressed-tensors"
CHECKPOINT_FORMATS = (
    CheckpointFormat("none", "bf16; float16 and float32 are rounded to it", "bf16"),
    CheckpointFormat("fp8", "e4m3, a scale for 128x128", "fp8_e4m3_g128"),
    CheckpointFormat(f"{_COMPRESSED} pack-quantized", "int4 or int8, by group or row", "int4_gG, int8_gG, int4, int8"),
    CheckpointFormat(f"{_COMPRESSED} int-quantized", "int8, by group or row", "int8_gG, int8"),
    CheckpointFormat(f"{_COMPRESSED} float-quantized", "e4m3, by row or 128x128", "fp8_e4m3, fp8_e4m3_g128"),
    CheckpointFormat(f"{_COMPRESSED} naive-quantized", "int8 or e4m3, as the two above", "int8, fp8_e4m3"),
    CheckpointFormat(f"{_COMPRESSED} nvfp4-pack-quantized", "e2m1, an e4m3 scale for 16", "nvfp4_g16"),
    CheckpointFormat(f"{_COMPRESSED} mxfp4-pack-quantized", "e2m1, an exponent for 32", "mxfp4_g32"),
    CheckpointFormat(f"{_COMPRESSED} mxfp8-quantized", "e4m3, an exponent for 32", "mxfp8_g32"),
    CheckpointFormat("modelopt NVFP4", "e2m1, an e4m3 scale for 16", "nvfp4_g16"),
    CheckpointFormat("mxfp4", "e2m1, an exponent for 32, fused (gpt-oss)", "mxfp4_g32"),
    CheckpointFormat("mxfp8", "e4m3, an exponent for 32", "mxfp8_g32"),
    CheckpointFormat("gptq", "int4 or int8, by group or row", "int4_gG, int8_gG"),
    CheckpointFormat("awq", "int4 by group, zero points", "int4_gG_zp"),
    *(CheckpointFormat(f"GGUF {kind}", "as llama.cpp stores it", gguf.packed_name(kind)) for kind in gguf.EXPERT_TYPES),
)
"""Checkpoint formats of routed experts. Each is served and trained on from one packed copy."""


def requested_format(name: str | None) -> str:
    """The name for the native loader. None becomes "": the checkpoint's own format. Raises UnknownNameError."""
    if name is not None and name not in QUANTIZE_FORMATS:
        raise UnknownNameError("expert format", name, QUANTIZE_FORMATS)
    return name or ""


def joined_format(names: Iterable[str]) -> str:
    """One format name for all layers of a store: the distinct names, sorted and joined by "+"."""
    return "+".join(sorted({part for name in names for part in name.split("+")}))
