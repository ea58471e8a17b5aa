"""The middle of a Gated DeltaNet layer token by token, as the paper writes it (Yang et al. 2024, arXiv:2412.06464), with
PyTorch's operators: differentiable, in the dtype of its arguments."""

from __future__ import annotations

import torch
from torch.nn import functional

from kt_runtime.experts.attention import DeltaHeads


def gated_delta(
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    heads: DeltaHeads,
    filter_: torch.Tensor,
    log_rate: torch.Tensor,
    bias: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence from its first token on: x [T, C], a, b [T, HV], filter_ [C, W] -> out [T, HV * V] and the last
    state [HV, K, V]."""
    taps, tokens = filter_.shape[1], len(x)
    padded = torch.cat([x.new_zeros(taps - 1, x.shape[1]), x])
    filtered = functional.silu(sum(padded[j : j + tokens] * filter_[:, j] for j in range(taps)))  # type: ignore[arg-type]
    of_keys = heads.key_heads * heads.key_size
    query, key, value = filtered.split([of_keys, of_keys, heads.value_heads * heads.value_size], dim=1)
    repeat = heads.value_heads // heads.key_heads
    query, key = (
        _unit(part.unflatten(1, (-1, heads.key_size))).repeat_interleave(repeat, dim=1) for part in (query, key)
    )
    query = query * heads.key_size**-0.5
    value = value.unflatten(1, (-1, heads.value_size))
    decay, strength = (-log_rate.exp() * functional.softplus(a + bias)).exp(), b.sigmoid()
    state = x.new_zeros(heads.value_heads, heads.key_size, heads.value_size)
    out = []
    for t in range(tokens):
        state = state * decay[t, :, None, None]
        change = (value[t] - torch.einsum("hkv,hk->hv", state, key[t])) * strength[t, :, None]
        state = state + torch.einsum("hk,hv->hkv", key[t], change)
        out.append(torch.einsum("hkv,hk->hv", state, query[t]).flatten())
    return torch.stack(out), state


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
