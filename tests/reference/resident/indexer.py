"""Sparse attention with an indexer, as DeepSeek-V3.2's report writes it (arXiv:2512.02556, section 2.1), query by query
with PyTorch's operators: differentiable, in the dtype of its arguments."""

from __future__ import annotations

import torch


def scores(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """One query: q [M, E], weights [M], keys [L, E] -> [L]."""
    heads, size = q.shape
    return (weights[:, None] * (q @ keys.T).relu()).sum(0) / (heads * size) ** 0.5


def chosen(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, top_k: int) -> list[list[int]]:
    """Of a sequence: q [T, M, E], weights [T, M], keys [L, E] -> of each of its last T tokens the positions of the keys
    that it sees. Of equal scores the first is chosen."""
    before, found = len(keys) - len(q), []
    for t in range(len(q)):
        visible = before + t + 1
        of_keys = scores(q[t], weights[t], keys[:visible])
        order = torch.sort(of_keys, descending=True, stable=True).indices[:top_k]
        found.append(sorted(order.tolist()))
    return found


def attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: list[list[int]], scaling: float
) -> torch.Tensor:
    """q [T, N, D], keys [L, D], values [L, V], of each query the positions that it sees -> [T, N, V]."""
    return torch.stack([(q[t] @ keys[own].T * scaling).softmax(-1) @ values[own] for t, own in enumerate(seen)])
