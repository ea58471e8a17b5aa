"""The twin's layers of Qwen3-Next and Qwen3.5 on a machine without a GPU, equal to serving's there
(`sglang_patch.delta`): Gated DeltaNet, attention with a gate at its output, and the experts' block with a gated shared
expert.

For a row that forks (`batches.Branch`) the delta rule runs over two sequences: the first one, and the prefix with the
rest of the second. What the second computes for the prefix is dropped.

Shapes: B rows, S tokens of each, H hidden, HV value heads of V elements.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn

from kt_runtime.experts.attention import DeltaHeads, DeltaWeights
from kt_runtime.ops.delta_net import delta_rule, gated_norm, sigmoid_and_multiply
from kt_runtime.ops.rotary import Rotary
from kt_runtime.resident.twin.attention import Branches, attend

DECODER_LAYERS = ("Qwen3NextDecoderLayer", "Qwen3_5MoeDecoderLayer")
"""Hugging Face's classes."""


def is_hybrid(layer: nn.Module) -> bool:
    return type(layer).__name__ in DECODER_LAYERS


def compute_natively(layer: Any) -> None:
    """Patches a decoder layer of Hugging Face to compute with kt-runtime's operations; its parameters stay in place."""
    if hasattr(layer, "linear_attn"):
        layer.linear_attn.forward = types.MethodType(_delta_net, layer.linear_attn)
    else:
        layer.self_attn.forward = types.MethodType(_gated_attention, layer.self_attn)
    layer.mlp.forward = types.MethodType(_experts_block, layer.mlp)


def _delta_net(layer: Any, hidden_states: torch.Tensor, branches: Branches = None, **_: Any) -> torch.Tensor:
    """[B, S, H] -> [B, S, H]."""
    batch, length = hidden_states.shape[:2]
    mixed, z, b, a = _inputs(layer, hidden_states)
    mixed, a, b = mixed.flatten(0, 1), a.flatten(0, 1), b.flatten(0, 1)
    heads = DeltaHeads(layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim)
    weights = DeltaWeights(heads, layer.conv1d.weight.squeeze(1), layer.A_log, layer.dt_bias)
    if branches is None:
        rows = torch.arange(batch)
        sequences = torch.stack([rows * length, *(torch.full_like(rows, n) for n in (length, 0, 0))], dim=1)
        out = delta_rule(mixed, a, b, weights, sequences)
    else:
        places, back, sequences = _unfolded(branches, length)
        out = delta_rule(mixed[places], a[places], b[places], weights, sequences)[back]
    normed = gated_norm(out.view(z.shape), z, layer.norm.weight, layer.norm.variance_epsilon)
    result: torch.Tensor = layer.out_proj(normed.flatten(2))
    return result


def _inputs(layer: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """[B, S, H] -> queries, keys and values [B, S, C], gates of the output [B, S, HV, V], write strengths and decays
    [B, S, HV]."""
    if hasattr(layer, "in_proj_qkv"):  # Qwen3.5
        z = layer.in_proj_z(hidden_states).unflatten(-1, (-1, layer.head_v_dim))
        return layer.in_proj_qkv(hidden_states), z, layer.in_proj_b(hidden_states), layer.in_proj_a(hidden_states)
    query, key, value, z, b, a = layer.fix_query_key_value_ordering(
        layer.in_proj_qkvz(hidden_states), layer.in_proj_ba(hidden_states)
    )
    return torch.cat([part.flatten(2) for part in (query, key, value)], dim=-1), z, b, a


def _unfolded(branches: tuple[Any, ...], length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The tokens of all sequences, one after another; where each row's tokens lie among them; the sequences."""
    places: list[torch.Tensor] = []
    back: list[torch.Tensor] = []
    sequences: list[list[int]] = []
    end = 0
    for row, branch in enumerate(branches):
        positions = torch.arange(length) + row * length
        rest = positions[branch.second :]
        places += [positions[: branch.second], positions[: branch.prefix], rest]
        sequences += [[end, branch.second, 0, 0], [end + branch.second, branch.prefix + len(rest), 0, 0]]
        first_of_rest = end + branch.second + branch.prefix
        back += [torch.arange(end, end + branch.second), torch.arange(first_of_rest, first_of_rest + len(rest))]
        end = first_of_rest + len(rest)
    return torch.cat(places), torch.cat(back), torch.tensor(sequences)


def _gated_attention(
    layer: Any,
    hidden_states: torch.Tensor,
    position_embeddings: Rotary,
    attention_mask: torch.Tensor | None = None,
    branches: Branches = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """[B, S, H] -> [B, S, H]."""
    size = layer.head_dim
    query, gate = layer.q_proj(hidden_states).unflatten(-1, (-1, 2 * size)).split(size, dim=-1)
    key, value = (proj(hidden_states).unflatten(-1, (-1, size)) for proj in (layer.k_proj, layer.v_proj))
    query, key = position_embeddings(layer.q_norm(query)), position_embeddings(layer.k_norm(key))
    out = attend(query, key, value, layer.scaling, branches)
    return layer.o_proj(sigmoid_and_multiply(gate.flatten(2), out.flatten(2))), None


def _experts_block(block: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """[B, S, H] -> [B, S, H]: routed experts plus the shared one times its gate."""
    tokens = hidden_states.flatten(0, -2)
    _, weights, ids = block.gate(tokens)
    routed = block.experts(tokens, ids, weights)
    gated = sigmoid_and_multiply(block.shared_expert_gate(tokens), block.shared_expert(tokens))
    return (routed + gated).view(hidden_states.shape)
