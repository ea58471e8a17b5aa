"""Names of weight formats (csrc/kernels/format.h): encoding, columns that share a scale, zero points.

bf16, fp8_e4m3_g128 (blocks of 128 x 128), int4_g32, int4_g128_zp, int8_g128, ...; without a group a row has one scale:
fp8_e4m3, int8, int4.
"""

from __future__ import annotations

from collections.abc import Iterable

from kt_runtime.errors import UnknownNameError

QUANTIZE_FORMATS = ("int4", "int8")
"""What bf16 and fp8 checkpoints can be quantized to while loading: int4 has a scale for 32 columns, int8 for a row."""


def requested_format(name: str | None) -> str:
    """The name as the native loader takes it; None is "", as the checkpoint stores its experts. UnknownNameError."""
    if name is not None and name not in QUANTIZE_FORMATS:
        raise UnknownNameError("expert format", name, QUANTIZE_FORMATS)
    return name or ""


def joined_format(names: Iterable[str]) -> str:
    """One name for the layers of a store; those of several formats are joined by "+", sorted."""
    return "+".join(sorted(set(names)))
