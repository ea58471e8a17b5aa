"""What ranks send each other for one token, and what a token takes on several hosts, on paper.

Shapes: N ranks, H hidden, A the width of attention's output (heads x value dimension), K experts of a token, a bytes of
an activation. A rank sends, for one token:

    attention                a A (N-1)/N   its heads
                             a H (N-1)/N   its outputs of the output projection
    norms of all heads, Q    a Q (N-1)/N   its queries and keys, of Q elements in all (OLMoE, MiniMax-M2)
    dense MLP, width I       a I (N-1)/N   its part of SwiGLU's result
                             a H (N-1)/N   its outputs
    routed experts           4 K H (N-1)/N^2   unweighted outputs of its experts, K/N of K on average, float32
                             a H (N-1)/N   its columns of the sum
    shared experts, width I  a I (N-1)/N   as a dense MLP; the outputs are part of the sum
    embedding                a H (N-1)/N
    head                     a V (N-1)/N   its logits

This is what the sharding needs. The native step sends as much between hosts, and the outputs of shared experts by
themselves, a H (N-1)/N more. With SGLang's modules, SGLang's own sums
over ranks (after attention, after the experts or the MLP, after the embedding) send twice that: a ring first sums, then
gathers. `Traffic.total` has that in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from math import comb
from typing import Any

from kt_runtime.families import Family, family_for
from kt_runtime.serve.models.checkpoint import count_parameters

OUTPUT_PROJECTIONS = ("o_proj", "out_proj")  # of attention, of Gated DeltaNet
SUMMED_TWICE = 2.0
EXPERT_BYTES = 4  # float32


@dataclass(frozen=True)
class Traffic:
    """Of one rank and one token. `needed`: bytes that the sharding needs to send; `sums`: those of them that SGLang's
    sums send twice; `exchanges`: calls that wait for all ranks."""

    needed: float
    sums: float
    exchanges: int

    @property
    def total(self) -> float:
        """Bytes sent, without headers of the network."""
        return self.needed + (SUMMED_TWICE - 1) * self.sums


def sent_bytes(config: Mapping[str, Any], *, num_ranks: int, activation_bytes: int) -> Traffic:
    """`config`: a model's config.json."""
    family, hidden = family_for(config), int(config["hidden_size"])
    moe_layers, num_layers = len(family.moe_layers(config)), int(config["num_hidden_layers"])
    others = (num_ranks - 1) / num_ranks
    experts = EXPERT_BYTES * int(config["num_experts_per_tok"]) * hidden / num_ranks
    normed = _normed_together(family, config)
    attention = sum(each.in_features for each in family.lora_modules(config) if each.projection in OUTPUT_PROJECTIONS)
    dense = (num_layers - moe_layers) * family.dense_intermediate(config) if num_layers > moe_layers else 0
    shared = moe_layers * family.shared_intermediate(config)
    widths = attention + num_layers * normed + dense + shared
    gathered = activation_bytes * (widths + int(config["vocab_size"]))
    sums = activation_bytes * hidden * (2 * num_layers + 1)
    exchanges = (6 if normed else 4) * num_layers + (moe_layers if shared else 0) + 2
    return Traffic(others * (gathered + sums + moe_layers * experts), others * sums, exchanges)


def _attention_width(config: Mapping[str, Any]) -> int:
    heads = int(config["num_attention_heads"])
    one = config.get("v_head_dim") or config.get("head_dim") or int(config["hidden_size"]) // heads
    return heads * int(one)


def _normed_together(family: Family, config: Mapping[str, Any]) -> int:
    """Elements of a token's queries and keys, if a norm sees all heads at once; else 0."""
    norms = family.attention_norms(config)
    sizes = [norms[name] for name in ("self_attn.q_norm", "self_attn.k_norm") if name in norms]
    return sum(sizes) if _attention_width(config) in sizes else 0


@dataclass(frozen=True)
class Machine:
    """`memory_bytes_per_s`: that a decode step reads weights with. `link_bytes_per_s`; `exchange_s`: of one exchange of
    no bytes, between the two furthest ranks. `overhead_s`: of a layer, whatever its size."""

    memory_bytes_per_s: float
    link_bytes_per_s: float
    exchange_s: float
    overhead_s: float = 0.0


@dataclass(frozen=True)
class Prediction:
    """Of one token of one stream, in seconds: reading weights, the link's bytes, waiting for exchanges, overhead."""

    reading_s: float
    bytes_s: float
    exchanges_s: float
    overhead_s: float

    @property
    def token_s(self) -> float:
        return self.reading_s + self.bytes_s + self.exchanges_s + self.overhead_s


def predicted(
    config: Mapping[str, Any], machine: Machine, *, num_hosts: int, weight_bytes: float, traffic: Traffic | None = None
) -> Prediction:
    """One rank on each host. `weight_bytes`: of a weight in memory (2 for bf16, 1 for fp8). `traffic`: None: as of
    `sent_bytes` in bf16.

    Nothing overlaps: neither reading with sending, nor one exchange with another. A layer's experts take as long as on
    the rank that has the most of a token's. Every rank reads what ranks do not split.
    """
    if traffic is None:
        traffic = sent_bytes(config, num_ranks=num_hosts, activation_bytes=2)
    family, layers = family_for(config), int(config["num_hidden_layers"])
    moe_layers = len(family.moe_layers(config))
    num_experts, _, _ = family.expert_shape(config)
    expert = 3 * int(config["hidden_size"]) * int(config["moe_intermediate_size"])
    most = busiest(num_experts, int(config["num_experts_per_tok"]), num_hosts)
    whole = sum(each.in_features * each.out_features for each in family.lora_modules(config) if each.is_whole)
    dense = (dense_parameters(config) - whole) / num_hosts + whole
    read = weight_bytes * (dense + moe_layers * most * expert)
    is_alone = num_hosts == 1
    return Prediction(
        read / machine.memory_bytes_per_s,
        0.0 if is_alone else traffic.total / machine.link_bytes_per_s,
        0.0 if is_alone else traffic.exchanges * machine.exchange_s,
        layers * machine.overhead_s,
    )


def dense_parameters(config: Mapping[str, Any]) -> int:
    """Weights outside the routed experts that a decoded token reads: all but the embedding."""
    return count_parameters(config).dense - int(config["vocab_size"]) * int(config["hidden_size"])


def busiest(num_experts: int, chosen: int, num_ranks: int) -> float:
    """The expected number of a token's experts on the rank that has the most, if every choice is as likely."""
    share = num_experts // num_ranks
    counts = (each for each in product(range(chosen + 1), repeat=num_ranks) if sum(each) == chosen)
    total = comb(num_experts, chosen)
    return sum(max(each) * _ways(share, each) for each in counts) / total


def _ways(share: int, counts: tuple[int, ...]) -> int:
    ways = 1
    for count in counts:
        ways *= comb(share, count)
    return ways
