"""Gated DeltaNet layers in the native step (`cpu/step.py`): what a model's layers keep, and the states of a batch.

Symbols (SGLang 0.5.23), only read: `HybridLinearAttnBackend`, which holds the backends of both kinds of layers, and
`HybridLinearKVPool`, whose `full_kv_pool` has keys and values of the layers with attention alone. For other models the
backend and the pool are these themselves.
"""

from __future__ import annotations

from typing import Any

import torch

from kt_runtime.sglang_patch.delta.attention import kept_in
from kt_runtime.sglang_patch.delta.layers import weights_of

SYMBOLS = (
    "sglang.srt.layers.attention.hybrid_linear_attn_backend.HybridLinearAttnBackend",
    "sglang.srt.mem_cache.memory_pool.HybridLinearKVPool",
)


def attending_backend(backend: Any) -> Any:
    """The backend of the layers with keys."""
    return getattr(backend, "full_attn_backend", backend)


def attending_pool(pool: Any) -> Any:
    """The pool of keys and values."""
    return getattr(pool, "full_kv_pool", pool)


def attending_layers(model: Any) -> dict[int, Any]:
    """The modules with attention's rotary embedding and scaling, by layer; `model`: SGLang's decoder stack."""
    attending = {index: layer for index, layer in enumerate(model.layers) if not hasattr(layer, "linear_attn")}
    return {index: getattr(layer, "self_attn", layer) for index, layer in attending.items()}


def kept_by_layers(model: Any, kv: list[tuple[torch.Tensor, ...]], requests: Any) -> list[tuple[torch.Tensor, ...]]:
    """The buffers of each layer. A layer with keys has the next one of `kv`. Another layer has the convolution's inputs
    and the states, in the pool `requests` (`experts.step.GatedDelta`)."""
    buffers = iter(kv)
    attending = attending_layers(model)
    kept: list[tuple[torch.Tensor, ...]] = []
    for index, layer in enumerate(model.layers):
        if index in attending:
            kept.append(next(buffers))
        else:
            states = kept_in(requests, index, weights_of(layer.linear_attn.attn).heads)
            kept.append((states.inputs, states.states))
    return kept


def state_slots(backend: Any) -> torch.Tensor | None:
    """int64 [B]: the slots of the prepared batch's states; None for a model without them."""
    if not hasattr(backend, "linear_attn_backend"):
        return None
    slots: torch.Tensor = backend.linear_attn_backend.forward_metadata[:, 2].contiguous()
    return slots
