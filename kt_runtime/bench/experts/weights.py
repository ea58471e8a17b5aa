"""Random weights of one layer, the same for every format and peer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kt_runtime.bench.experts.shapes import BenchShape

DEVIATION = 0.02
QUANTILES = 1 << 16


@dataclass(frozen=True)
class Weights:
    gate_up: Tensor  # [E, 2I, H] bfloat16: gate, then up
    down: Tensor  # [E, H, I] bfloat16

    def expert(self, index: int) -> dict[str, Tensor]:
        """Views: gate_proj [I, H], up_proj [I, H], down_proj [H, I]."""
        gate, up = self.gate_up[index].chunk(2)
        return {"gate_proj": gate, "up_proj": up, "down_proj": self.down[index]}


def random_weights(shape: BenchShape, seed: int = 0) -> Weights:
    """Normal(0, 0.02) in bfloat16."""
    generator = np.random.PCG64(seed)
    table = _quantiles()
    gate_up = torch.empty(shape.num_experts, 2 * shape.intermediate, shape.hidden, dtype=torch.bfloat16)
    down = torch.empty(shape.num_experts, shape.hidden, shape.intermediate, dtype=torch.bfloat16)
    for expert in range(shape.num_experts):
        for matrix in (gate_up[expert], down[expert]):
            _fill(matrix, generator, table)
    return Weights(gate_up, down)


def _fill(matrix: Tensor, generator: np.random.PCG64, table: np.ndarray) -> None:
    """Fills `matrix`: 16 random bits choose a quantile. Ten times as fast as drawing normal numbers; bf16 hardly
    resolves more."""
    count = matrix.numel()
    bits = generator.random_raw(-(-count // 4)).view(np.uint16)[:count]
    matrix.view(torch.int16).numpy().reshape(-1)[:] = table[bits]


def _quantiles() -> np.ndarray:
    """The quantiles as bfloat16, stored in int16."""
    middle = (torch.arange(QUANTILES, dtype=torch.float64) + 0.5) / QUANTILES
    return (torch.special.ndtri(middle) * DEVIATION).bfloat16().view(torch.int16).numpy()
