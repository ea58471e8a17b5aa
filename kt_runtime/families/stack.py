"""A family's decoder stack as a table, from which the native step (csrc/step) is built.

Tensors are named as SGLang 0.5.23 names them (`model.named_parameters()`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StackLayer:
    """Grouped-query attention with norms on each head's queries and keys, and routed experts. All are tensors' names.

    `qkv`: queries, keys and values, fused. A bias is None where the linear layer has none. `experts`: the layer's
    number in the expert store.
    """

    input_norm: str
    qkv: str
    qkv_bias: str | None
    query_norm: str
    key_norm: str
    out: str
    out_bias: str | None
    post_norm: str
    gate: str
    experts: int


@dataclass(frozen=True, slots=True)
class DecoderStack:
    """`normalises`: the routing weights of a token sum to 1. `epsilon`: of every norm."""

    heads: int
    key_heads: int
    head_size: int
    top_k: int
    normalises: bool
    epsilon: float
    embedding: str
    final_norm: str
    layers: tuple[StackLayer, ...]
