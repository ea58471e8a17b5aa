"""The native step: a model's whole decoder stack as one call (csrc/step/program.h).

H hidden, I intermediate, N query heads, K key heads, D head size, E experts, S slots of the KV pool. Sizes of latent
attention: rank is `q_lora_rank`, latent `kv_lora_rank`; nope, rope and value are `qk_nope_head_dim`, `qk_rope_head_dim`
and `v_head_dim`. Tensors of a table are contiguous and have one dtype, float32 or bfloat16. They are read and written
in place. The matrix of a linear layer may be a `PackedWeight` of this dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kt_runtime import _experts
from kt_runtime.errors import InvalidValueError
from kt_runtime.experts.attention import Sequences
from kt_runtime.experts.layer import ExpertLayer
from kt_runtime.experts.native import capsule, resolve_isa, steps, translated_errors
from kt_runtime.experts.packed.weight import PackedWeight


@dataclass(frozen=True, kw_only=True)
class GroupedQuery:
    """`qkv` [(N + 2 K) D, H], `out` [H, N D] and their biases; `keys` and `values` [S, K, D].

    Norms: [D] for each head, [N D] and [K D] for all heads at once, or None. `sinks` [N] float32: of each head a score
    without a value. `window`: keys that a query sees at most, its own included; 0: all. `is_gated`: `qkv`
    [(2 N + 2 K) D, H] has, after each head's query, as many gates, whose sigmoids multiply the head's output.
    `rotates`: queries and keys are rotated; `norms_last`: normed after that. `is_chunked`: a query sees the keys of its
    own chunk. `temperatures` float32 [P / `temperature_every` + 1] multiply the queries, at
    (position + 1) / `temperature_every`.
    """

    qkv: Tensor
    qkv_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    keys: Tensor
    values: Tensor
    out: Tensor
    out_bias: Tensor | None
    sinks: Tensor | None = None
    window: int = 0
    rotates: bool = True
    norms_last: bool = False
    is_chunked: bool = False
    temperatures: Tensor | None = None
    temperature_every: int = 1
    is_gated: bool = False


@dataclass(frozen=True, kw_only=True)
class GatedDelta:
    """Gated DeltaNet (`experts.attention.gated_delta`), with an RMSNorm of each value head and gates of the result.
    HK key heads, HV value heads, C channels, W taps; M slots of states.

    `inputs` [C + HV V, H]: queries, keys, values, gates of the result; `gates` [2 HV, H]: write strengths, decays; the
    rows of both in this order, or `by_key_head`, each key head with its value heads. `filter` [C, W]; `log_rate` and
    `bias` [HV], perhaps in float32; `norm` [V]; `out` [H, HV V]. What sequences keep: `kept_inputs` [M, C, W - 1],
    `states` [M, HV, K, V] float32.
    """

    inputs: Tensor
    gates: Tensor
    filter: Tensor
    log_rate: Tensor
    bias: Tensor
    norm: Tensor
    out: Tensor
    kept_inputs: Tensor
    states: Tensor
    key_heads: int
    by_key_head: bool


@dataclass(frozen=True, kw_only=True)
class Indexer:
    """Chooses the keys that a query sees (csrc/ops/router/indexer.h). M heads of E elements: `query` [M E, rank],
    `key` [E, H]; float32: `norm_weight` and `norm_bias` [E], `weights` [M, H]."""

    query: Tensor
    key: Tensor
    norm_weight: Tensor
    norm_bias: Tensor
    weights: Tensor
    interleaved: bool


@dataclass(frozen=True, kw_only=True)
class Latent:
    """In absorbed order. `compress` [rank + latent + rope, H]; without a `query_norm` [rank] the rank is 0.

    `query` [N (nope + rope), rank], or [N (nope + rope), H]; `latent_norm` [latent]; `key_heads` [N, latent, nope] and
    `value_heads` [N, value, latent]; `keys` [S, 1, latent + rope]; `out` [H, N value]. `top_k` above 0: a query sees so
    many keys at most, which the `indexer` chooses, or the one of an earlier layer; `keys` then has E elements more in
    each row, for index keys.
    """

    compress: Tensor
    query_norm: Tensor | None
    query: Tensor
    latent_norm: Tensor
    key_heads: Tensor
    value_heads: Tensor
    keys: Tensor
    out: Tensor
    indexer: Indexer | None = None
    top_k: int = 0


@dataclass(frozen=True, kw_only=True)
class GatedMlp:
    """`gate_up` [2 I, H], `down` [H, I]. `gate` [1, H]: the sigmoid of its product multiplies the result."""

    gate_up: Tensor
    down: Tensor
    gate: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class RoutedExperts:
    """`gate` [E, H], perhaps in float32 where experts are chosen in groups; `bias` [E] float32, of that choice.
    `gate_bias` [E]: of the logits where they are not."""

    gate: Tensor
    bias: Tensor | None
    experts: ExpertLayer
    gate_bias: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class StepLayer:
    """Norms [H]. The layer's MLP is the sum of `mlp` and `routed`; one of them may be None."""

    input_norm: Tensor
    attention: GroupedQuery | Latent | GatedDelta
    post_norm: Tensor
    mlp: GatedMlp | None
    routed: RoutedExperts | None


@dataclass(frozen=True, kw_only=True)
class LayerLora:
    """The engine's LoRA pool in one layer, read in place. L slots, R the highest rank; others as above.

    A linear layer [out, in] of P fused parts has A [L, P R, in] and B [L, out, R]; in a slot an adapter of rank r has r
    rows of A for each part, one part after the other. `qkv` has three parts, `compress` (which needs a rank) and
    `mlp_gate_up` two; so have `inputs` and `gates` of Gated DeltaNet, or one by key head; `kv_b`, of kv_b_proj
    [N (nope + value), latent], has one. Routed experts: `gate_up_a`
    [L, E, 2 R, H], `gate_up_b` [L, E, 2 I, R], with gate from row 0, up from row R and row I; `down_a` [L, E, R, I],
    `down_b` [L, E, H, R]. An adapter uses the first r columns of each B. None: the pool does not adapt these layers.
    """

    qkv_a: Tensor | None = None
    qkv_b: Tensor | None = None
    inputs_a: Tensor | None = None
    inputs_b: Tensor | None = None
    gates_a: Tensor | None = None
    gates_b: Tensor | None = None
    compress_a: Tensor | None = None
    compress_b: Tensor | None = None
    query_a: Tensor | None = None
    query_b: Tensor | None = None
    kv_b_a: Tensor | None = None
    kv_b_b: Tensor | None = None
    out_a: Tensor | None = None
    out_b: Tensor | None = None
    mlp_gate_up_a: Tensor | None = None
    mlp_gate_up_b: Tensor | None = None
    mlp_down_a: Tensor | None = None
    mlp_down_b: Tensor | None = None
    gate_up_a: Tensor | None = None
    gate_up_b: Tensor | None = None
    down_a: Tensor | None = None
    down_b: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class LoraPool:
    """`slots` and `rank`: L and R of all `layers`."""

    slots: int
    rank: int
    layers: Sequence[LayerLora]


class AdapterRows(NamedTuple):
    """The tokens [first, first + rows) of a batch have the adapter of `rank` in `slot`, on dense layers."""

    first: int
    rows: int
    slot: int
    rank: int
    scaling: float


class ExpertAdapter(NamedTuple):
    """An adapter of routed experts."""

    slot: int
    rank: int
    scaling: float


@dataclass(frozen=True)
class BatchLora:
    """The adapters of a batch: `rows` in ascending order; `token_slots` [T] int32, indices into `experts`, or -1."""

    rows: Sequence[AdapterRows] = ()
    experts: Sequence[ExpertAdapter] = ()
    token_slots: Tensor | None = None


NO_LORA = BatchLora()
LEFT_OUT = {"weighs_input": False, "chunk": 0, "offset_norms": False, "vocabulary": 0, "ids_per_rank": 0}
"""Defaults of the numbers that a table of scalars may lack."""


@dataclass(frozen=True)
class StepShare:
    """The step's part of a model that several ranks share: heads and their keys, experts, rows of `out`, `gate_up`,
    `down` and of the embedding. Rank r's embedding has the ids from r * `ids_per_rank` on. `exchange`: with the others,
    which all run the same batches."""

    exchange: _experts.Exchange
    rank: int
    num_ranks: int
    ids_per_rank: int


class Step:
    """Built once for a model; `run` computes a batch. Not thread-safe. Keeps the tensors alive.

    `scalars`: heads, top_k, normalises, epsilon, scaling, interleaved, perhaps those of `LEFT_OUT`, and groups, the
    router's (groups, top_groups, is_sigmoid, scaling) or None (`families.stack`). With a `share` heads are the rank's,
    and vocabulary has the number of token ids. `tensors`: embedding [V, H],
    final_norm [H], angles [P, D] or [P, rope] (of each position the cosines, then the sines). `lora`: of as many
    layers; None: batches have no adapters.
    InvalidValueError: a tensor that does not fit.
    """

    def __init__(
        self,
        scalars: Mapping[str, object],
        tensors: Mapping[str, Tensor],
        layers: Sequence[StepLayer],
        lora: LoraPool | None = None,
        *,
        share: StepShare | None = None,
        isa: str | None = None,
        num_threads: int | None = None,
    ) -> None:
        threads = _experts.default_num_threads() if num_threads is None else num_threads
        pools: Sequence[LayerLora | None] = [None] * len(layers) if lora is None else lora.layers
        if len(pools) != len(layers):
            raise InvalidValueError(f"the LoRA pool has {len(pools)} layers; the decoder stack has {len(layers)}")
        table = {
            **LEFT_OUT,
            **scalars,
            "exchange": None if share is None else share.exchange,
            "ids_per_rank": 0 if share is None else share.ids_per_rank,
            "lora_slots": 0 if lora is None else lora.slots,
            "lora_rank": 0 if lora is None else lora.rank,
            **dict.fromkeys(("embedding", "angles", "final_norm")),
            **{name: capsule(tensor, name) for name, tensor in tensors.items()},
            "layers": [
                _named_layer(layer, pool, f"layers[{index}]")
                for index, (layer, pool) in enumerate(zip(layers, pools, strict=True))
            ],
        }
        with translated_errors():
            self._native = _experts.Step(resolve_isa(isa), threads, table)
        steps.add(self._native)
        self._hidden, self._dtype = tensors["embedding"].shape[1], tensors["embedding"].dtype

    def run(
        self,
        ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        sequences: Sequences,
        lora: BatchLora = NO_LORA,
        routes: Tensor | None = None,
        states: Tensor | None = None,
    ) -> tuple[Tensor, list[int]]:
        """T new tokens, sequence by sequence -> hidden states [T, H] after the final norm.

        ids, positions, slots: int64 [T]; the new keys and values are written to `slots`. `sequences`: where the keys of
        each sequence lie, those of its new tokens included. `states` int64 [B], where layers are Gated DeltaNet: of
        each sequence the slot of its state, which begins with zeros where there are no keys before its new tokens.
        `lora`: the tokens' adapters, in the pool's present content. `routes` [M, T, K] int32, if given, takes the ids
        of the experts that each of the M layers with routed experts chose, larger weights first; -1 where the token is
        refused.

        Also returns the tokens whose activations were NaN or Inf before the experts of some layer: the experts returned
        zeros for them there. In a batch with an adapter also those whose keys or values were NaN or Inf: the pool then
        has zeros. InvalidValueError: an id, position, slot, state, length or adapter out of range; then nothing has
        been written. LostRankError: another rank has ended or does not answer; the ranks compute nothing any more.
        """
        out = torch.empty(len(ids), self._hidden, dtype=self._dtype, device="cpu")
        with translated_errors():
            return out, self._native.run(
                ids=capsule(ids, "ids"),
                positions=capsule(positions, "positions"),
                slots=capsule(slots, "slots"),
                sequences=capsule(sequences.rows, "sequences"),
                table=None if sequences.slots is None else capsule(sequences.slots, "table"),
                states=None if states is None else capsule(states, "states"),
                adapter_rows=lora.rows,
                expert_adapters=lora.experts,
                token_slots=None if lora.token_slots is None else capsule(lora.token_slots, "token_slots"),
                out=capsule(out, "out"),
                routes=None if routes is None else capsule(routes, "routes"),
            )

    @property
    def scratch_bytes(self) -> int:
        """Memory kept for a batch's activations. Freed when about 3,000 batches needed less than half of it, and by
        `free_spare_memory`."""
        return self._native.scratch_bytes


def _named_layer(layer: StepLayer, pool: LayerLora | None, where: str) -> dict[str, object]:
    return {**_named(layer, where), "lora": None if pool is None else _named(pool, f"{where}.lora")}


def _named(values: Any, where: str) -> dict[str, object]:
    """The fields of a dataclass by name, as the native step's table has them."""
    named: dict[str, object] = {}
    for field in fields(values):
        value, name = getattr(values, field.name), f"{where}.{field.name}"
        if isinstance(value, PackedWeight):
            named[field.name] = value.native
        elif isinstance(value, Tensor):
            named[field.name] = capsule(value, name)
        elif isinstance(value, ExpertLayer):
            named[field.name] = value.native()
        elif isinstance(value, bool | int):
            named[field.name] = value
        else:
            named[field.name] = None if value is None else _named(value, name)
    return named
