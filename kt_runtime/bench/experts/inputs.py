"""Activations, routings and LoRA tensors of a case: the same for every format, thread count and peer.

In a model with many layers, a layer's weights have left the CPU caches before the layer runs again. The benchmark keeps
them cold too: with few tokens, successive calls cycle through a shuffled list of experts, so an expert is read again
only after all others. If one call needs more than all experts, each token's experts are random, and a call reads nearly
the whole layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kt_runtime.bench.experts.shapes import BenchShape
from kt_runtime.experts import LoraSlot

LORA_SCALING = 2.0
MOST_BATCHES = 64


@dataclass(frozen=True)
class Batch:
    x: Tensor  # [T, H] bfloat16, normal(0, 1)
    ids: Tensor  # [T, K] int32, distinct within a token
    weights: Tensor  # [T, K] float32, softmax of normal numbers
    grad_out: Tensor  # [T, H] bfloat16, normal(0, 1)

    @property
    def num_tokens(self) -> int:
        return self.x.shape[0]

    @property
    def touched_experts(self) -> int:
        return self.ids.unique().numel()

    def first(self, num_tokens: int) -> Batch:
        return Batch(*(t[:num_tokens].contiguous() for t in (self.x, self.ids, self.weights, self.grad_out)))


def make_batches(shape: BenchShape, num_tokens: int) -> list[Batch]:
    """Batches for successive calls; all touch the same number of experts."""
    generator = torch.Generator().manual_seed(num_tokens)
    return [
        Batch(
            torch.randn(num_tokens, shape.hidden, generator=generator).bfloat16(),
            ids,
            torch.randn(num_tokens, shape.top_k, generator=generator).softmax(1),
            torch.randn(num_tokens, shape.hidden, generator=generator).bfloat16(),
        )
        for ids in _routings(shape, num_tokens, generator)
    ]


def _routings(shape: BenchShape, num_tokens: int, generator: torch.Generator) -> list[Tensor]:
    """[T, K] int32 for each batch."""
    wanted = num_tokens * shape.top_k
    if wanted > shape.num_experts:
        scores = torch.rand(num_tokens, shape.num_experts, generator=generator)
        return [scores.topk(shape.top_k).indices.int()]
    deck = torch.randperm(shape.num_experts, generator=generator).int()
    num_batches = min(MOST_BATCHES, shape.num_experts)
    cards = torch.arange(num_batches * wanted) % shape.num_experts
    return list(deck[cards].view(num_batches, num_tokens, shape.top_k))


def make_lora(shape: BenchShape) -> LoraSlot:
    """bfloat16, all three projections of every expert; neither A nor B is zero."""
    generator = torch.Generator().manual_seed(1)
    experts, rank, hidden, inner = shape.num_experts, shape.rank, shape.hidden, shape.intermediate

    def pair(cols: int, rows: int) -> tuple[Tensor, Tensor]:
        a = torch.randn(experts, rank, cols, generator=generator) / cols**0.5
        b = torch.randn(experts, rows, rank, generator=generator) * 0.02
        return a.bfloat16(), b.bfloat16()

    return LoraSlot(*pair(hidden, inner), *pair(hidden, inner), *pair(inner, hidden), scaling=LORA_SCALING)
