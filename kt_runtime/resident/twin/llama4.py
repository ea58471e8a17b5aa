"""The twin's layers of Llama 4: chunked attention, layers without rotary embedding, routing weights on the input.

Shapes: B rows, S tokens of each, T = B S, N query heads, D head size, H hidden, E experts.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn
from transformers.models.llama4.modeling_llama4 import apply_rotary_emb

from kt_runtime.families.stack import GatedDelta, GroupedQuery, Latent
from kt_runtime.ops.norms import frozen_rms_norm
from kt_runtime.ops.rotary import Rotary
from kt_runtime.ops.row_factors import scale_rows, temperature_of
from kt_runtime.resident.twin import attention as twin_attention
from kt_runtime.resident.twin.attention import Branches, Seen

ATTENTION, MOE = "Llama4TextAttention", "Llama4TextMoe"
"""Hugging Face's classes, which `attend_in_turns` patches and `WeighedInputMoe` replaces."""


class WeighedInputMoe(nn.Module):
    """Replaces Hugging Face's MLP with experts in place: a token's one expert gets its input times the routing weight.

    Hugging Face rounds the weight to the model's dtype first, and computes all experts of each token, all but one on
    zeros. In a float32 model both are equal.
    """

    router: nn.Module
    experts: nn.Module
    shared_expert: nn.Module

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, S, H] -> [T, H], and logits [T, E], as Hugging Face's."""
        hidden = hidden_states.flatten(0, -2)
        logits, weights, ids = _routed(self.router, hidden)
        routed = self.experts(scale_rows(hidden, weights[:, 0]), ids, torch.ones_like(weights))
        return self.shared_expert(hidden) + routed, logits


def _routed(router: nn.Module, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits [T, E], weights [T, 1] in float32, ids [T, 1]. With a GPU the router is Hugging Face's."""
    found = router(hidden)
    if len(found) == 3:
        return found
    scores, logits = found
    ids = logits.topk(1, dim=-1).indices
    return logits, scores.gather(-1, ids).float(), ids


def attend_in_turns(attention: nn.Module, table: GroupedQuery | Latent | GatedDelta, chunk: int) -> None:
    """Patches an attention module of Hugging Face: `table` says what its layer does, `chunk` how long chunks are."""
    assert isinstance(table, GroupedQuery)

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        position_embeddings: Rotary | torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        branches: Branches = None,
        places: torch.Tensor | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        heads = [
            one(hidden_states).unflatten(-1, (-1, self.head_dim)) for one in (self.q_proj, self.k_proj, self.v_proj)
        ]
        query, key, value = heads
        if table.rotates:
            query, key = _rotated(query, key, position_embeddings)
        if table.unit_norms:
            ones = torch.ones(self.head_dim, dtype=query.dtype, device=query.device)
            query, key = (frozen_rms_norm(x, ones, self.qk_norm.eps) for x in (query, key))
        if table.temperature is not None:
            where = position_embeddings.places if isinstance(position_embeddings, Rotary) else places
            assert where is not None
            count = self.config.max_position_embeddings
            heat = temperature_of(where, table.temperature.every, table.temperature.strength, count)
            query = scale_rows(query, heat.expand(query.shape[:2])[..., None].expand(query.shape[:3]))
        seen = Seen(chunk=chunk if table.is_chunked else 0)
        if isinstance(position_embeddings, Rotary):
            out = twin_attention.attend(query, key, value, self.scaling, branches, seen)
        else:
            out = _attended(query, key, value, self.scaling, attention_mask)
        return self.o_proj(out.flatten(2)), None

    attention.forward = types.MethodType(forward, attention)


def _rotated(
    query: torch.Tensor, key: torch.Tensor, rotation: Rotary | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(rotation, Rotary):
        return rotation(query), rotation(key)
    return apply_rotary_emb(query, key, rotation)


def _attended(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, mask: torch.Tensor | None
) -> torch.Tensor:
    """PyTorch's attention, used with a GPU: [B, S, N, D]; `mask`: True where a query may see a key, None: causal."""
    groups = query.shape[2] // key.shape[2]
    key, value = (x.repeat_interleave(groups, dim=2).transpose(1, 2) for x in (key, value))
    out = nn.functional.scaled_dot_product_attention(
        query.transpose(1, 2), key, value, attn_mask=mask, is_causal=mask is None, scale=scaling
    )
    return out.transpose(1, 2)
