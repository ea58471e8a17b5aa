"""The measured weight formats, and the checkpoint encoding and quantization of each."""

from __future__ import annotations

from dataclasses import dataclass

from kt_runtime.errors import UnknownNameError


@dataclass(frozen=True)
class Encoding:
    """A checkpoint's weight storage: `bits` per weight, one scale per `group` columns (0: fp8 blocks, or bf16)."""

    bits: int
    group: int = 0
    zero_points: bool = False


# Checkpoint encodings by name.
ENCODINGS = {
    "bf16": Encoding(16),
    "fp8": Encoding(8),  # e4m3, blocks of 128 x 128, as DeepSeek ships it
    "int4_g32": Encoding(4, 32),  # compressed-tensors, as Kimi-K2 ships it
    "int4_g128": Encoding(4, 128),
    "int4_g128_zp": Encoding(4, 128, zero_points=True),
    "int8_g128": Encoding(8, 128),
}


@dataclass(frozen=True)
class BenchFormat:
    """`encoding`: of the checkpoint. `quantize`: the store's expert_format. `path`: forward's multiply instruction."""

    name: str
    encoding: str
    quantize: str | None
    path: str  # the peak to compare with: "bf16" or "int8"


FORMATS = {
    form.name: form
    for form in (
        BenchFormat("bf16", "bf16", None, "bf16"),
        BenchFormat("fp8", "fp8", None, "bf16"),
        BenchFormat("int8", "bf16", "int8", "int8"),  # a scale a row, quantized while loading
        BenchFormat("int4", "bf16", "int4", "int8"),  # groups of 32 columns, quantized while loading
        BenchFormat("int4_g32", "int4_g32", None, "int8"),
        BenchFormat("int4_g128", "int4_g128", None, "int8"),
        BenchFormat("int4_g128_zp", "int4_g128_zp", None, "int8"),
        BenchFormat("int8_g128", "int8_g128", None, "int8"),
    )
}
DEFAULT_FORMATS = ("bf16", "fp8", "int8", "int4")


def parse_format(name: str) -> BenchFormat:
    if name not in FORMATS:
        raise UnknownNameError("format", name, FORMATS)
    return FORMATS[name]
