"""The layers of Qwen3-Next and Qwen3.5 on a CPU with kt-runtime's operations, which the training twin calls too.

Symbols (SGLang 0.5.23), where no CUDA kernel runs:

- `models.qwen3_next.Qwen3GatedDeltaNet.__init__`, `models.qwen3_5.Qwen3_5GatedDeltaNet.__init__`: the first asks
  PyTorch for the module of its device, which is CUDA's wherever PyTorch was built with CUDA. Both get the rows of
  transformers' linears.
- `.forward` of both: SGLang's gated norm is a Triton kernel, and so is what orders Qwen3.5's inputs.
- `models.qwen3_next.Qwen3HybridAttentionDecoderLayer.self_attention`,
  `models.qwen3_5.Qwen3_5AttentionDecoderLayer.self_attention`: PyTorch's sigmoid differs in the last bit between whole
  vectors and what is behind them, which depends on the size of the batch.
- `models.qwen2_moe.Qwen2MoeSparseMoeBlock.forward`: the gate of the shared expert is a Triton kernel.
- `layers.layernorm.GemmaRMSNorm.forward_native`: the norms whose weight is an offset from one. PyTorch's mean has an
  order of its own.

Shapes: T tokens, H hidden, C channels, HV value heads of V elements.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from kt_runtime.experts import dense
from kt_runtime.experts.attention import DeltaHeads, DeltaWeights
from kt_runtime.ops.delta_net import gated_norm, offset_rms_norm, sigmoid_and_multiply
from kt_runtime.sglang_patch.hooks import Hooks

SYMBOLS = (
    "sglang.srt.models.qwen3_next.Qwen3GatedDeltaNet.__init__",
    "sglang.srt.models.qwen3_next.Qwen3GatedDeltaNet.forward",
    "sglang.srt.models.qwen3_next.Qwen3HybridAttentionDecoderLayer.self_attention",
    "sglang.srt.models.qwen2_moe.Qwen2MoeSparseMoeBlock.forward",
    "sglang.srt.layers.layernorm.GemmaRMSNorm.forward_native",
    "sglang.srt.models.qwen3_5.Qwen3_5GatedDeltaNet.__init__",
    "sglang.srt.models.qwen3_5.Qwen3_5GatedDeltaNet.forward",
    "sglang.srt.models.qwen3_5.Qwen3_5AttentionDecoderLayer.self_attention",
    "sglang.srt.layers.radix_linear_attention.RadixLinearAttention",
)

PARTS = "kt_parts"
"""Attribute of a merged linear of SGLang's: the rows of each of transformers' linears in it (`delta.lora`)."""


def install(hooks: Hooks) -> None:
    if hooks.on_cpu:
        hooks.around(SYMBOLS[0], built_on_cpu)
        hooks.replace(SYMBOLS[1], delta_net)
        hooks.replace(SYMBOLS[2], gated_attention)
        hooks.around(SYMBOLS[3], experts_block)
        hooks.around(SYMBOLS[4], offset_norm)
        hooks.around(SYMBOLS[5], built_with_parts)
        hooks.replace(SYMBOLS[6], delta_net)
        hooks.replace(SYMBOLS[7], gated_attention)


def built_on_cpu(original: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
    with mock.patch.object(torch, "get_device_module", lambda *_: torch.cpu):
        original(layer, *args, **kwargs)
    layer.norm.to(torch.get_default_dtype())  # SGLang takes the checkpoint's dtype, which `--dtype` may differ from
    for linear in (layer.in_proj_qkvz, layer.in_proj_ba):
        setattr(linear, PARTS, (sum(linear.output_partition_sizes),))


def built_with_parts(original: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
    with mock.patch.object(torch, "get_device_module", lambda *_: torch.cpu):
        original(layer, *args, **kwargs)
    layer.norm.to(torch.get_default_dtype())
    heads, values = layer.num_v_heads // layer.attn_tp_size, layer.value_dim // layer.attn_tp_size
    setattr(layer.in_proj_qkvz, PARTS, (2 * layer.key_dim // layer.attn_tp_size + values, values))
    setattr(layer.in_proj_ba, PARTS, (heads, heads))


def weights_of(layer: Any) -> DeltaWeights:
    """Weights of SGLang's `RadixLinearAttention`, whose attributes are views of the layer's parameters."""
    heads = DeltaHeads(layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim)
    return DeltaWeights(heads, layer.conv_weights.detach(), layer.A_log.detach(), layer.dt_bias.detach())


def delta_net(layer: Any, hidden_states: torch.Tensor, forward_batch: Any) -> torch.Tensor:
    """[T, H] -> [T, H]."""
    inputs, _ = layer.in_proj_qkvz(hidden_states)
    gates, _ = layer.in_proj_ba(hidden_states)
    query, key, value, z, b, a = layer.fix_query_key_value_ordering(inputs, gates)
    mixed = torch.cat([part.flatten(1) for part in (query, key, value)], dim=-1)
    out = layer.attn(forward_batch, mixed_qkv=mixed, a=a.contiguous(), b=b.contiguous())
    normed = gated_norm(out.reshape(z.shape), z, layer.norm.weight.detach(), layer.layer_norm_epsilon)
    result: torch.Tensor = layer.out_proj(normed.flatten(1))[0]
    return result


def gated_attention(
    layer: Any, positions: torch.Tensor, hidden_states: torch.Tensor, forward_batch: Any
) -> torch.Tensor:
    """[T, H] -> [T, H]."""
    q, k, v, gate = layer.forward_prepare_native(positions=positions, hidden_states=hidden_states)
    out = layer.attn(q, k, v, forward_batch)
    result: torch.Tensor = layer.o_proj(sigmoid_and_multiply(gate.reshape(out.shape), out))[0]
    return result


def experts_block(
    original: Any, block: Any, hidden_states: torch.Tensor, forward_batch: Any = None, defer_finalize: bool = False
) -> torch.Tensor:
    """[T, H] -> [T, H]: routed experts plus the shared one times its gate; over ranks to be summed."""
    if block.shared_expert is None or block.shared_expert_gate is None or defer_finalize or not len(hidden_states):
        result: torch.Tensor = original(block, hidden_states, forward_batch, defer_finalize)
        return result
    routed = block._forward_router_experts(hidden_states)
    shared = block.shared_expert(hidden_states)
    gate = dense.linear(hidden_states, block.shared_expert_gate.weight.detach())
    return routed + sigmoid_and_multiply(gate, shared)


def offset_norm(
    original: Any,
    norm: Any,
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    post_residual_addition: torch.Tensor | None = None,
) -> Any:
    if post_residual_addition is not None or not x.is_cpu:
        return original(norm, x, residual, post_residual_addition)
    if residual is None:
        return offset_rms_norm(x, norm.weight.detach(), norm.variance_epsilon)
    total = x + residual
    return offset_rms_norm(total, norm.weight.detach(), norm.variance_epsilon), total
