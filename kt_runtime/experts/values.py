"""Arguments and results of a layer of routed experts.

Shapes: T tokens, K experts per token, H hidden, I intermediate, E experts, R LoRA rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kt_runtime import _experts

Retained = _experts.Retained

LORA_TENSORS = ("gate_a", "gate_b", "up_a", "up_b", "down_a", "down_b")


@dataclass(frozen=True)
class ExpertShape:
    num_experts: int
    hidden: int
    intermediate: int


@dataclass
class LoraSlot:
    """One adapter for all experts of a layer: y = W x + scaling * B (A x), for gate, up and down.

    Tensors are float32 or bfloat16, contiguous in the last dimension, with any other strides. A and B are both None for
    a projection without an adapter. A [E, R, in], B [E, out, R]; the rank may differ between projections.

    `dropout`: probability with which an element of A's input is zeroed; the others are divided by 1 - dropout. The
    choice depends on `seed` (0 to 2^64 - 1), token, expert and projection, and is the same in forward and backward.
    `tokens` [T] int64, `first_expert`: in a call with a part of a larger one's tokens and experts (`kt_runtime.ranks`),
    the numbers there of its rows and of its expert 0.
    """

    gate_a: Tensor | None = None  # [E, R, H]
    gate_b: Tensor | None = None  # [E, I, R]
    up_a: Tensor | None = None  # [E, R, H]
    up_b: Tensor | None = None  # [E, I, R]
    down_a: Tensor | None = None  # [E, R, I]
    down_b: Tensor | None = None  # [E, H, R]
    scaling: float = 1.0
    dropout: float = 0.0
    seed: int = 0
    tokens: Tensor | None = None
    first_expert: int = 0

    def tensors(self) -> tuple[Tensor | None, ...]:
        """In the order of LORA_TENSORS."""
        return (self.gate_a, self.gate_b, self.up_a, self.up_b, self.down_a, self.down_b)

    def zeros(self) -> LoraSlot:
        """A slot of float32 zeros with the same shapes, in CPU memory, for accumulating gradients."""
        return self.with_tensors([None if t is None else _zeros(t.shape) for t in self.tensors()])

    def with_tensors(self, tensors: Sequence[Tensor | None]) -> LoraSlot:
        gate_a, gate_b, up_a, up_b, down_a, down_b = tensors
        return replace(self, gate_a=gate_a, gate_b=gate_b, up_a=up_a, up_b=up_b, down_a=down_a, down_b=down_b)


@dataclass
class ExpertGradients:
    """`x` has x's dtype; `weights` and the tensors of `slots` are float32. The gradient of a None slot is None."""

    x: Tensor
    weights: Tensor
    slots: list[LoraSlot | None]


def _zeros(shape: torch.Size) -> Tensor:
    return torch.zeros(shape, dtype=torch.float32, device="cpu")
