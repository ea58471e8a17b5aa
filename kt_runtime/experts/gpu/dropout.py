"""LoRA dropout on a device: the mask of csrc/ops/pairs/dropout.h, bit for bit.

The mask is a function of the slot's seed, the token, its expert, the projection and the column. So a token's mask is
the same on the CPU and on a device, in forward and in backward, and whatever the chunk. It is never stored.

The hash works on 64-bit words: torch's int64 wraps in products and sums, and a shift with the sign bits masked away is
that of unsigned words.
"""

from __future__ import annotations

import torch
from torch import Tensor

STEP = 0x9E3779B97F4A7C15
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
NUM_PROJECTIONS = 3


def dropout_mask(seed: int, dropout: float, tokens: Tensor, experts: Tensor, projection: int, columns: int) -> Tensor:
    """float32 [R, columns]: 0 or 1 / (1 - dropout), what A's input is multiplied with.

    tokens, experts: int64 [R], of each row. projection: 0 gate, 1 up, 2 down.
    """
    of_token = _mixed(_signed(seed) + (tokens + 1) * _signed(STEP))
    key = _mixed(of_token + experts * NUM_PROJECTIONS + projection)
    column = torch.arange(1, columns + 1, device=tokens.device) * _signed(STEP)
    bits = _shifted(_mixed(key[:, None] + column), 40)
    as_float = torch.tensor(dropout, dtype=torch.float32)
    kept = (1.0 / (1.0 - as_float)).item()
    limit = int(as_float.item() * (1 << 24))
    return (bits >= limit).to(torch.float32) * kept


def _mixed(z: Tensor) -> Tensor:
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014)."""
    z = (z ^ _shifted(z, 30)) * _signed(FIRST)
    z = (z ^ _shifted(z, 27)) * _signed(SECOND)
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word
