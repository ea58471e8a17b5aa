"""Names of weight formats (csrc/kernels/format.h): encoding, group size (columns that share a scale), zero points.

bf16, fp8_e4m3_g128 (blocks of 128 x 128), int4_g32, int4_g128_zp, int8_g128, ... Names without a group size have one
scale per row: fp8_e4m3, int8, int4. "k" after the encoding: scales are bytes with a float16 for 256 columns, as in
GGUF's K formats: int4k_g32 (Q4_K), int5k_g32, int6k_g16. A layer whose down matrices have another format names both:
int4k_g32+int6k_g16.
"""

from __future__ import annotations

from collections.abc import Iterable

from kt_runtime.errors import UnknownNameError

QUANTIZE_FORMATS = ("int4", "int8")
"""Target formats for bf16 and fp8 checkpoints when loading: int4 has a scale per 32 columns, int8 one per row."""


def requested_format(name: str | None) -> str:
    """The name for the native loader. None becomes "": the checkpoint's own format. Raises UnknownNameError."""
    if name is not None and name not in QUANTIZE_FORMATS:
        raise UnknownNameError("expert format", name, QUANTIZE_FORMATS)
    return name or ""


def joined_format(names: Iterable[str]) -> str:
    """One format name for all layers of a store: the distinct names, sorted and joined by "+"."""
    return "+".join(sorted({part for name in names for part in name.split("+")}))
