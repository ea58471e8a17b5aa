"""The shapes of the measured layers."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

from kt_runtime.errors import InvalidValueError, UnknownNameError

BF16_BYTES = 2
MATRICES = 3  # gate, up, down
LORA_RANK = 8
LARGEST = 1 << 24


@dataclass(frozen=True)
class BenchShape:
    name: str
    num_experts: int
    top_k: int
    hidden: int
    intermediate: int
    rank: int = LORA_RANK

    def __post_init__(self) -> None:
        for field in ("num_experts", "top_k", "hidden", "intermediate", "rank"):
            if not 1 <= getattr(self, field) <= LARGEST:
                raise InvalidValueError(f"shape {self.name}: {field} is {getattr(self, field)}; allowed: 1 to 2^24")
        if self.top_k > self.num_experts:
            raise InvalidValueError(
                f"shape {self.name}: a token has {self.top_k} experts, but there are {self.num_experts}"
            )

    @property
    def weights_per_expert(self) -> int:
        return MATRICES * self.hidden * self.intermediate

    @property
    def bf16_bytes(self) -> int:
        """The layer's size in plain bfloat16."""
        return BF16_BYTES * self.num_experts * self.weights_per_expert

    def with_experts(self, num_experts: int) -> BenchShape:
        return dataclasses.replace(self, num_experts=num_experts)


SHAPES = {
    shape.name: shape
    for shape in (
        BenchShape("dsv2lite", 64, 6, 2048, 1408),
        BenchShape("qwen3", 128, 8, 2048, 768),
        BenchShape("dsv3", 256, 8, 7168, 2048),
        BenchShape("kimi", 384, 8, 7168, 2048),
    )
}


def parse_shape(text: str) -> BenchShape:
    """`text`: a name of SHAPES, or ExKxHxIxR such as 64x6x2048x1408x8. Raises UnknownNameError, InvalidValueError."""
    if text in SHAPES:
        return SHAPES[text]
    if not re.fullmatch(r"\d+([x,]\d+)*", text):
        raise UnknownNameError("shape", text, [*SHAPES, "EXPERTSxTOP_KxHIDDENxINTERMEDIATExRANK"])
    sizes = [int(size) for size in re.split("[x,]", text)]
    if len(sizes) != 5:
        raise InvalidValueError(
            f"shape {text!r} has {len(sizes)} numbers, expected five:"
            " experts x experts for a token x hidden x intermediate x LoRA rank, such as 64x6x2048x1408x8"
        )
    return BenchShape("x".join(map(str, sizes)), *sizes)
