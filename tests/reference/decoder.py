"""The one reference of attention and RMSNorm in Python: as torch operations, in the dtype of what is given, so that
float64 tensors give the truth and autograd its gradients. tests/unit/csrc/reference.h is the same for C++."""

from __future__ import annotations

import torch
from torch import Tensor


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scaling: float,
    cap: float = 0.0,
    window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """The last T queries of a sequence over all its L keys: q [T, N, D], k [L, K, D], v [L, K, V] -> [T, N, V].

    Query heads are N / K to a key head. `cap`: scores become cap * tanh(score / cap); 0: none. `window`: keys that a
    query sees at most; 0: all. `sinks` [N]: a score of each head that has no value.
    """
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("tnd,lnd->ntl", q, k.repeat_interleave(group, 1)) * scaling
    if cap:
        scores = cap * torch.tanh(scores / cap)
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + k.shape[0] - q.shape[0])
    if window:
        hidden = hidden | torch.ones_like(hidden).tril(k.shape[0] - q.shape[0] - window)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].to(scores.dtype).expand(*scores.shape[:2], 1)], dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[0]]
    return torch.einsum("ntl,lnv->tnv", weights, v.repeat_interleave(group, 1))


def inverse_rms(x: Tensor, epsilon: float) -> Tensor:
    """1 / sqrt(mean of x^2 over the last dimension + epsilon), which stays, of size 1."""
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)
