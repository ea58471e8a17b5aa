"""The indexer of DeepSeek Sparse Attention (DeepSeek-V3.2, arXiv:2512.02556): which keys a query sees.

From a layer's normed input x and its compressed queries c, of M heads of E elements:

    q = rotated(wq_b c) [M, E]      k = rotated(LayerNorm(wk x)) [E]      w = weights_proj x [M], in float32
    score of a key = sum over the heads of w * max(<q, k>, 0) / sqrt(M E)

A query sees the `top_k` keys with the largest scores, of equal ones the first (`kt_runtime.experts.attention`). The
first elements of q and k are rotated, as many as the rotary table has. Serving and training call the same functions;
the native step calls their kernels in the same order (csrc/step/latent.cpp). There is no gradient: the indexer is
frozen, and so is its choice.

B sequences, S tokens, L keys, T tokens, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kt_runtime.experts import attention, dense
from kt_runtime.ops.router import float32_logits


@dataclass(frozen=True, eq=False)
class IndexerWeights:
    """`query` [M E, rank] and `key` [E, H] of the model's dtype; `norm_weight`, `norm_bias` [E] and `weights` [M, H] in
    float32. `interleaved`: the rotation is of adjacent elements."""

    query: torch.Tensor
    key: torch.Tensor
    norm_weight: torch.Tensor
    norm_bias: torch.Tensor
    weights: torch.Tensor
    interleaved: bool


@dataclass(frozen=True, eq=False)
class Index:
    """Queries [B, S, M, E], keys [B, L, E] and weights [B, S, M] of an indexer; the queries are those of the last S of
    L tokens."""

    queries: torch.Tensor
    keys: torch.Tensor
    weights: torch.Tensor
    top_k: int

    def chosen(self) -> torch.Tensor | None:
        """int32 [B S, top_k]: rows of the keys [B L]. None: every query sees all keys before it."""
        batch, tokens = self.queries.shape[:2]
        sequences = attention.contiguous(batch, tokens, self.keys.shape[1])
        queries, keys, weights = (x.flatten(0, 1) for x in (self.queries, self.keys, self.weights))
        return attention.select_keys(queries, weights, keys, sequences, self.top_k)

    def first(self, tokens: int) -> Index:
        """The index of the first `tokens` tokens, of sequences that have no keys but their own."""
        return Index(self.queries[:, :tokens], self.keys[:, :tokens], self.weights[:, :tokens], self.top_k)

    def after(self, prefix: int, start: int) -> Index:
        """The index of the tokens from `start` on, which see the first `prefix` keys and their own."""
        keys = torch.cat([self.keys[:, :prefix], self.keys[:, start:]], dim=1)
        return Index(self.queries[:, start:], keys, self.weights[:, start:], self.top_k)

    def rows(self) -> list[Index]:
        """The index of each sequence."""
        parts = zip(self.queries.split(1), self.keys.split(1), self.weights.split(1), strict=True)
        return [Index(queries, keys, weights, self.top_k) for queries, keys, weights in parts]

    @staticmethod
    def of_rows(rows: Sequence[Index]) -> Index:
        queries, keys, weights = (
            torch.cat([getattr(row, name) for row in rows]) for name in ("queries", "keys", "weights")
        )
        return Index(queries, keys, weights, rows[0].top_k)


@torch.no_grad()
def index_rows(
    hidden: torch.Tensor,
    compressed: torch.Tensor,
    weights: IndexerWeights,
    angles: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden [T, H], compressed [T, rank], angles [P, R], positions [T] int64 -> q [T, M, E], k [T, E], w [T, M]."""
    size = len(weights.key)
    queries = dense.linear(compressed, weights.query).unflatten(-1, (-1, size))
    keys = dense.linear(hidden, weights.key)
    attention.prepare_index_rows(
        queries, keys, weights.norm_weight, weights.norm_bias, angles, positions, weights.interleaved
    )
    return queries, keys, float32_logits(hidden, weights.weights)
