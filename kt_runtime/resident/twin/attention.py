"""The twin's attention on a machine without a GPU, equal to serving's there (`sglang_patch.cpu.attention`).

Serving computes attention in float32, whatever the model's dtype is, and keeps DeepSeek's MLA absorbed in prefill too:
keys and values stay in the latent space; each head's part of `kv_b_proj` multiplies the query and the attention output
(DeepSeek-V2, arXiv:2405.04434, section 2.1.2). Hugging Face expands keys and values per head. In exact arithmetic both
are equal. In bf16 they round differently, which sends some tokens to other experts, so training would learn from
probabilities that serving never computed.

For a row that forks (`batches.Branch`), attention runs in two parts: the first sequence, then the rest of the second
over prefix and rest. The result is that of two separate rows.

Shapes: B sequences, S tokens of each, N query heads, D latent size (`kv_lora_rank`), P rotary size, K and V sizes of a
head's key without the rotary part and of its value, R LoRA rank.
"""

from __future__ import annotations

import types
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from kt_runtime.ops import mla
from kt_runtime.ops.attention import attend_batch, attend_batch_backward
from kt_runtime.ops.indexer import Index, IndexerWeights, index_rows
from kt_runtime.ops.matmul import frozen_heads
from kt_runtime.ops.rotary import Rotary
from kt_runtime.ranks import Exchange
from kt_runtime.resident.twin.batches import Branch
from kt_runtime.resident.twin.lora_linear import LoraLinear
from kt_runtime.resident.twin.split import Heads

NAME = "kt_float32"
"""`float32_attention` among Hugging Face's attention implementations."""

Positions = Rotary | torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""How a layer rotates queries and keys; with a GPU, Hugging Face's tables: cos and sin, or one complex tensor."""


Branches = tuple[Branch, ...] | None
"""Where each row forks; None: no row does."""


@dataclass(frozen=True, eq=False)
class Seen:
    """Which of the causal keys a query sees, and what else enters its softmax. `window`: most keys, its own included;
    0: all. `chunk`: only keys of its own chunk of so many positions; 0: all. `sinks` [N]: a frozen score for each head,
    without a value. `index`: that of an indexer, which chooses among the keys.

    `exchange`: that of ranks that share query heads but not the keys, which all heads see. A rank computes its heads'
    part of the result. The gradient of the keys is a sum over heads, so each rank computes those of all heads."""

    window: int = 0
    sinks: torch.Tensor | None = None
    chunk: int = 0
    index: Index | None = None
    exchange: Exchange | None = None


EVERYTHING = Seen()


class _Attention(torch.autograd.Function):
    """Causal attention of the last queries over all keys; backward recomputes the scores."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, seen: Seen = EVERYTHING
    ) -> torch.Tensor:
        heads = Heads(seen.exchange)
        own = heads.part(q)
        # Saved in float32: backward subtracts <grad, out> from each score's gradient, which may be equally small.
        log_sums = own.new_empty(own.shape[:-1], dtype=torch.float32)
        sinks = None if seen.sinks is None else seen.sinks.detach().float()
        chosen = None if seen.index is None else seen.index.chosen()
        out = attend_batch(own, k, v, scaling, log_sums=log_sums, sinks=sinks, window=seen.window, chosen=chosen)
        out, log_sums = (heads.joined(part, wanted=any(ctx.needs_input_grad)) for part in (out, log_sums[..., None]))
        ctx.save_for_backward(q, k, v, out, log_sums[..., 0])
        ctx.scaling, ctx.window, ctx.chosen = scaling, seen.window, chosen
        return out.to(q.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, log_sums = ctx.saved_tensors
        found = attend_batch_backward(grads[0], q, k, v, out, log_sums, ctx.scaling, ctx.window, ctx.chosen)
        return (*found, None, None)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scaling: float,
    branches: Branches = None,
    seen: Seen = EVERYTHING,
) -> torch.Tensor:
    """Causal attention in float32, rounded once: q [B, S, N, .], k and v [B, S, key heads, .] -> [B, S, N, .]."""
    if branches is None:
        return _causal(q, k, v, scaling, seen)
    rows = zip(q.split(1), k.split(1), v.split(1), branches, strict=True)
    each = [seen] * len(q) if seen.index is None else [replace(seen, index=index) for index in seen.index.rows()]
    return torch.cat([_forked(*row, scaling, own) for row, own in zip(rows, each, strict=True)])


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, seen: Seen) -> torch.Tensor:
    """Causal attention of the last queries. Each chunk that has some of them is a sequence of its own."""
    length, tokens, chunk = k.shape[1], q.shape[1], seen.chunk
    if not chunk or length <= chunk:
        return _Attention.apply(q, k, v, scaling, seen)
    before, parts = length - tokens, []
    for start in range(before // chunk * chunk, length, chunk):
        keys, queries = slice(start, start + chunk), slice(max(start - before, 0), start + chunk - before)
        part = (x.contiguous() for x in (q[:, queries], k[:, keys], v[:, keys]))
        parts.append(_Attention.apply(*part, scaling, seen))
    return torch.cat(parts, dim=1)


def _forked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, branch: Branch, scaling: float, seen: Seen
) -> torch.Tensor:
    """One row: q [1, S, N, .], k and v [1, S, key heads, .] -> [1, S, N, .]."""
    first, second = slice(0, branch.second), slice(branch.second, None)
    index = seen.index
    own = seen if index is None else replace(seen, index=index.first(branch.second))
    parts = [_causal(q[:, first], k[:, first], v[:, first], scaling, own)]
    if branch.second < q.shape[1]:
        keys, values = (torch.cat([x[:, : branch.prefix], x[:, second]], dim=1) for x in (k, v))
        own = seen if index is None else replace(seen, index=index.after(branch.prefix, branch.second))
        parts.append(_causal(q[:, second], keys, values, scaling, own))
    return torch.cat(parts, dim=1)


def places_of(branches: Branches, length: int, device: torch.device) -> torch.Tensor:
    """[B, S], or [1, S] without branches: each token's position in its sequence."""
    place = torch.arange(length, device=device)[None]
    if branches is None:
        return place
    ends = torch.tensor([[branch.prefix, branch.second] for branch in branches], device=device)
    prefix, second = ends[:, :1], ends[:, 1:]
    return torch.where(place < second, place, place - second + prefix)


def visible_keys(
    branches: Branches, length: int, device: torch.device, window: int = 0, chunk: int = 0
) -> torch.Tensor:
    """[B, 1, S, S] attention mask: True where a query may see a key, for attention that needs a mask. `window` and
    `chunk`: as of `Seen`. B is 1 without branches."""
    place = torch.arange(length, device=device)
    ends = [[branch.prefix, branch.second] for branch in branches or (Branch(length, length),)]
    prefix, second = torch.tensor(ends, device=device)[:, :, None, None].unbind(1)
    hidden = (place[:, None] >= second) & (place >= prefix) & (place < second)
    seen = (place[:, None] >= place) & ~hidden
    position = places_of(branches, length, device)[:, None]  # [B, 1, S]
    if window:
        seen &= position.mT - position < window
    if chunk:
        seen &= position.mT // chunk == position // chunk
    return seen[:, None]


def float32_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    branches: Branches = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """`attend` for Hugging Face: query [B, N, S, .], key and value [B, key heads, S, .] -> [B, S, N, .]."""
    if attention_mask is not None:
        raise AssertionError("the twin attends causally over whole sequences, without a mask")
    return attend(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), scaling, branches), None


AttentionInterface.register(NAME, float32_attention)


def rotate_natively(attention: nn.Module, window: int = 0) -> None:
    """Patches a grouped-query attention module of Hugging Face to rotate and attend with kt-runtime's kernels.

    `window`: as of `Seen`. The sinks are the module's `sinks`, if it has any.
    """

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        position_embeddings: Rotary,
        attention_mask: torch.Tensor | None = None,
        branches: Branches = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        query = position_embeddings(_heads(self, self.q_proj(hidden_states), "q_norm"))
        key = position_embeddings(_heads(self, self.k_proj(hidden_states), "k_norm"))
        seen = Seen(window, getattr(self, "sinks", None))
        out = attend(query, key, _heads(self, self.v_proj(hidden_states)), self.scaling, branches, seen)
        return self.o_proj(out.flatten(2)), None

    attention.forward = types.MethodType(forward, attention)


def _heads(attention: Any, projected: torch.Tensor, norm_name: str = "") -> torch.Tensor:
    """[B, S, N D] -> [B, S, N, D], with the norm of that name if the module has one: of each head, or of all at once
    (OLMoE)."""
    norm = getattr(attention, norm_name, None) if norm_name else None
    is_per_head = norm is not None and norm.weight.shape[0] == attention.head_dim
    if norm is not None and not is_per_head:
        projected = norm(projected)
    heads = projected.unflatten(-1, (-1, attention.head_dim))
    return norm(heads) if norm is not None and is_per_head else heads


@dataclass(frozen=True)
class Indexing:
    """How a layer of latent attention chooses keys: by the indexer of layer `source`, its own or an earlier one.
    `is_shared`: later layers take this layer's choice. `interleaved`: of the indexer's rotation."""

    layer: int
    source: int
    top_k: int
    is_shared: bool
    interleaved: bool

    def index(self, attention: Any, hidden: torch.Tensor, compressed: torch.Tensor, rotary: Rotary) -> Index:
        """hidden [B, S, H], compressed [B, S, rank]: the layer's normed input and compressed queries."""
        batch, length = hidden.shape[:2]
        if self.source != self.layer:
            rows = [rotary.kept[self.source, rotary.first_row + row] for row in range(batch)]
            return Index.of_rows(rows)
        own = attention.indexer
        norm = own.k_norm.weight.float(), own.k_norm.bias.float()
        weights = IndexerWeights(
            own.wq_b.weight, own.wk.weight, *norm, own.weights_proj.weight.float(), self.interleaved
        )
        places = rotary.places.expand(batch, length).flatten()
        flat = (hidden.detach().flatten(0, 1), compressed.detach().flatten(0, 1))
        queries, keys, scales = (
            found.unflatten(0, (batch, length)) for found in index_rows(*flat, weights, rotary.angles, places)
        )
        index = Index(queries, keys, scales, self.top_k)
        if self.is_shared:
            for row, of_row in enumerate(index.rows()):
                rotary.kept[self.layer, rotary.first_row + row] = of_row
        return index


def absorb(attention: nn.Module, indexing: Indexing | None = None, exchange: Exchange | None = None) -> None:
    """Patches a Hugging Face attention module of DeepSeek-V2, -V3 or -V3.2 to compute MLA in absorbed order.

    Parameters stay in place; W_v is a view of `kv_b_proj`'s weight, W_k is a temporary copy in each call. Compared with
    the expanded order, scores and weighted sums take (2 D + P) / (K + P + V) times as many operations (3.4 with
    DeepSeek-V3's sizes); everything else takes equally many.

    `exchange`: of ranks that share the heads; latents and rotary keys are whole on each.
    """
    heads = Heads(exchange)

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        position_embeddings: Rotary,
        attention_mask: torch.Tensor | None = None,
        branches: Branches = None,
        **_: Any,
    ) -> tuple[torch.Tensor | None, ...]:
        # Dropout acts on kv_b_proj's input, which absorbed attention never computes.
        drops_out = isinstance(self.kv_b_proj, LoraLinear) and self.kv_b_proj.drops_out()
        compute = _expanded if drops_out else _absorbed
        out = compute(self, hidden_states, position_embeddings, branches, indexing, heads)
        return (out, None, None) if hasattr(self, "skip_topk") else (out, None)  # GLM's layers share a choice

    attention.forward = types.MethodType(forward, attention)


def _absorbed(
    attention: Any,
    hidden: torch.Tensor,
    rotary: Rotary,
    branches: Branches,
    indexing: Indexing | None,
    heads: Heads,
) -> torch.Tensor:
    batch, length = hidden.shape[:2]
    latent_size = attention.kv_lora_rank
    query_nope, query_rope, latent, key_rope, seen = _projected(attention, hidden, rotary, indexing, heads)
    weight = KvWeight(attention, heads)
    absorbed = weight.into_query(query_nope.flatten(0, 1)).unflatten(0, (batch, length))
    queries = torch.cat([absorbed, heads.all(query_rope)], dim=-1)
    keys = torch.cat([latent[:, :, None], key_rope], dim=-1)
    seen = replace(seen, exchange=heads.exchange)
    attended = attend(queries, keys, keys[..., :latent_size], attention.scaling, branches, seen)
    out = weight.into_output(attended.flatten(0, 1))
    return attention.o_proj(out.reshape(batch, length, -1))


def _expanded(
    attention: Any,
    hidden: torch.Tensor,
    rotary: Rotary,
    branches: Branches,
    indexing: Indexing | None,
    heads: Heads,
) -> torch.Tensor:
    """Attention as in Hugging Face's module, with keys and values for each head."""
    nope, value = attention.qk_nope_head_dim, attention.v_head_dim
    query_nope, query_rope, latent, key_rope, seen = _projected(attention, hidden, rotary, indexing, heads)
    expanded = attention.kv_b_proj(heads.entered(latent)).unflatten(-1, (-1, nope + value))
    key_nope, values = expanded.split([nope, value], dim=-1)
    of_all = key_rope.expand(*key_rope.shape[:2], heads.count(key_nope.shape[2]), -1)
    keys = torch.cat([key_nope, heads.own(of_all)], dim=-1)
    queries = torch.cat([query_nope, query_rope], dim=-1)
    out = attend(queries, keys, values.contiguous(), attention.scaling, branches, seen)
    return attention.o_proj(out.flatten(2))


def _projected(
    attention: Any, hidden: torch.Tensor, rotary: Rotary, indexing: Indexing | None, heads: Heads
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Seen]:
    """Queries [B, S, N, K] and [B, S, N, P] of this rank's heads, latents [B, S, D], rotary keys [B, S, 1, P], and
    what queries see."""
    nope, rope, latent_size = attention.qk_nope_head_dim, attention.qk_rope_head_dim, attention.kv_lora_rank
    seen = EVERYTHING
    if attention.q_lora_rank is None:
        query = attention.q_proj(hidden)
    else:
        compressed = attention.q_a_layernorm(attention.q_a_proj(hidden))
        query = attention.q_b_proj(heads.entered(compressed))
        if indexing is not None:
            seen = Seen(index=indexing.index(attention, hidden, compressed, rotary))
    query_nope, query_rope = query.unflatten(-1, (-1, nope + rope)).split([nope, rope], dim=-1)
    latent, key_rope = attention.kv_a_proj_with_mqa(hidden).split([latent_size, rope], dim=-1)
    latent = attention.kv_a_layernorm(latent)
    return query_nope, rotary(query_rope), latent, rotary(key_rope[:, :, None]), seen


class KvWeight:
    """`kv_b_proj` as per-head matrices W_k [N, K, D] and W_v [N, V, D], with LoRA added as in serving.

    `kt_runtime.ops.mla` has the formulas. T tokens. Of several ranks each has the matrices of its heads, n of N, and
    LoRA's A, whose gradient is a sum over all heads: its products are those of all heads on each rank.
    """

    def __init__(self, attention: Any, heads: Heads) -> None:
        linear = attention.kv_b_proj
        self._heads, self._key_size = heads, attention.qk_nope_head_dim
        self._num_own = attention.num_heads // heads.count(1)
        base = linear.get_base_layer() if isinstance(linear, LoraLinear) else linear
        self._w_k, self._w_v = mla.halves(base.get_parameter("weight"), self._num_own, self._key_size)
        self._lora = linear.active_lora() if isinstance(linear, LoraLinear) else []

    def into_query(self, query: torch.Tensor) -> torch.Tensor:
        """query [T, n, K] -> [T, N, D]."""
        out = self._heads.all(frozen_heads(query, self._w_k.mT.contiguous()))
        for a, b, scaling in self._lora:
            b_k, _ = mla.halves(b, self._num_own, self._key_size)
            out = mla.query_with(out, self._heads.all(mla.low_query(query, b_k)), a, scaling)
        return out

    def into_output(self, latent: torch.Tensor) -> torch.Tensor:
        """latent [T, N, D] -> [T, n, V]."""
        out = frozen_heads(self._heads.own(latent), self._w_v)
        for a, b, scaling in self._lora:
            _, b_v = mla.halves(b, self._num_own, self._key_size)
            out = mla.output_with(out, self._heads.own(mla.low_output(latent, a)), b_v, scaling)
        return out
