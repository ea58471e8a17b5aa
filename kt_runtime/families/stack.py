"""A family's decoder stack as a table, from which the native step (csrc/step) is built.

Tensors are named as SGLang 0.5.23 names them (`model.named_parameters()`). A bias is None where there is none.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupedQuery:
    """Grouped-query attention. `qkv`: queries, keys and values, fused. The norms are of each head's queries and keys,
    or, if they are as wide as all heads together, of all that a token has."""

    qkv: str
    qkv_bias: str | None
    query_norm: str | None
    key_norm: str | None
    out: str
    out_bias: str | None


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (MLA) in absorbed order.

    `compress`: q_a_proj and kv_a_proj_with_mqa, fused; or, without `q_lora_rank`, kv_a_proj_with_mqa alone, and there
    is no `query_norm`. `query`: q_b_proj, or q_proj. `key_heads` and `value_heads`: what SGLang derives from kv_b_proj,
    w_kc [N, key, latent] and w_vc [N, latent, value], which are attributes of the module, not parameters.
    """

    compress: str
    query_norm: str | None
    query: str
    latent_norm: str
    key_heads: str
    value_heads: str
    out: str


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """`gate_up`: gate and up, fused."""

    gate_up: str
    down: str


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """`bias`: of the choice of experts, in float32. `experts`: the layer's number in the expert store."""

    gate: str
    bias: str | None
    experts: int


@dataclass(frozen=True, slots=True)
class StackLayer:
    """`mlp`: a dense MLP, or the shared experts beside routed ones."""

    input_norm: str
    attention: GroupedQuery | Latent
    post_norm: str
    mlp: GatedMlp | None
    routed: RoutedExperts | None


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """A router that chooses among experts in groups, from float32 logits (csrc/ops/router/grouped_router.h).

    `is_sigmoid`: scores are sigmoids of the logits, else their softmax. `scaling`: `routed_scaling_factor`.
    """

    groups: int
    top_groups: int
    is_sigmoid: bool
    scaling: float


@dataclass(frozen=True, slots=True)
class DecoderStack:
    """`groups`: None: the router is a softmax of all logits, which have the model's dtype. `normalises`: the routing
    weights of a token sum to 1. `epsilon`: of every norm. `interleaved`: the rotary embedding turns adjacent elements,
    else those half a head apart."""

    heads: int
    top_k: int
    normalises: bool
    groups: ExpertGroups | None
    epsilon: float
    interleaved: bool
    embedding: str
    final_norm: str
    layers: tuple[StackLayer, ...]
