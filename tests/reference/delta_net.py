"""The middle of a Gated DeltaNet layer token by token, as the paper writes it (Yang et al. 2024, arXiv:2412.06464),
with PyTorch's operators: differentiable, in the dtype of its arguments."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

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


@contextlib.contextmanager
def hugging_face_in_float64() -> Iterator[None]:
    """In this context Hugging Face's models compute the delta rule token by token in float64, and the rest as always.

    Their own form, in chunks and float32, has an error of 1e-5 by itself: the inverse of a triangular matrix.
    """
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as qwen3_5
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

    with contextlib.ExitStack() as patches:
        for module in (qwen3_next, qwen3_5):
            patches.enter_context(mock.patch.object(module, "torch_chunk_gated_delta_rule", _rule_in_float64))
        yield


@contextlib.contextmanager
def without_float32() -> Iterator[None]:
    """In this context what Hugging Face's modules convert to float32 (norms, decays, routing weights) is float64: a
    model in float64 is computed in float64 throughout."""
    with (
        mock.patch.object(torch, "float32", torch.float64),
        mock.patch.object(torch, "float", torch.float64),
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        yield


def _rule_in_float64(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, T, HV, .] each, g and beta [B, T, HV] -> out [B, T, HV, V] in query's dtype, and the last state."""
    dtype = query.dtype
    query, key, value, g, beta = (part.double() for part in (query, key, value, g, beta))
    query, key = _unit(query) * query.shape[-1] ** -0.5, _unit(key)
    state = query.new_zeros(*value.shape[:1], value.shape[2], key.shape[-1], value.shape[-1])
    out = []
    for t in range(query.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        found = torch.einsum("bhkv,bhk->bhv", state, key[:, t])
        change = (value[:, t] - found) * beta[:, t, :, None]
        state = state + torch.einsum("bhk,bhv->bhkv", key[:, t], change)
        out.append(torch.einsum("bhkv,bhk->bhv", state, query[:, t]))
    return torch.stack(out, 1).to(dtype), state.float()
