"""Llama 4 as a text model: its rotary embedding, and, where no CUDA kernel runs, its attention and its experts.

Symbols (SGLang 0.5.23), of `models.llama4` unless said otherwise:

- `get_rope`, as `Llama4Attention.__init__` calls it. Hugging Face rotates adjacent elements. SGLang rotates elements
  half a head apart, and its `Llama4ForConditionalGeneration` reorders the rows of q_proj and k_proj while loading.
  `Llama4ForCausalLM`, the text model, does not reorder them, and so answers wrongly. Here it rotates adjacent elements:
  LoRA adapters on q_proj and k_proj need no reordering either. The table has a row for each position of the server's
  context; Scout's 10 million would take 5 GB.
- `Llama4Attention.forward`: SGLang drops the rotated queries and keys where its rotary embedding does not write in
  place, as on a CPU, and rounds them to bf16 before their norm, whatever the model's dtype is. Its temperature is
  compiled by torch.compile. Here each operation is kt-runtime's, as in the twin (`resident/twin/llama4.py`).
- `Llama4MoE._forward_core`: SGLang compiles its router, and computes its logits in the model's dtype.
- `model_executor.model_runner.ModelRunner.init_attention_backends`: on CUDA only SGLang's FlashAttention attends within
  chunks. With another backend, a context longer than a chunk is refused: its answers would be wrong.
- `Llama4ForCausalLM.get_hidden_dim`, which SGLang's LoRA asks for sizes and this class lacks. `lora.utils`' table,
  which it takes then, has the experts' intermediate size for the dense layers too.

Chunked attention is that of the attention backend (`cpu/attention.py`), for layers with `use_irope`; the routing weight
multiplies the experts' input in `cpu/moe.py`.
"""

from __future__ import annotations

from typing import Any

import torch

from kt_runtime import device
from kt_runtime.errors import InvalidValueError
from kt_runtime.experts.dense import GroupedRouting
from kt_runtime.ops.grouped_router import grouped_top_k
from kt_runtime.ops.norms import rms_norm
from kt_runtime.ops.router import float32_logits
from kt_runtime.ops.row_factors import scale_rows, temperature_of
from kt_runtime.sglang_patch.hooks import Hooks

SYMBOLS = (
    "sglang.srt.models.llama4.get_rope",
    "sglang.srt.models.llama4.Llama4Attention.forward",
    "sglang.srt.models.llama4.Llama4MoE._forward_core",
    "sglang.srt.models.llama4.Llama4ForCausalLM.get_hidden_dim",
    "sglang.srt.model_executor.model_runner.ModelRunner.init_attention_backends",
    "sglang.srt.layers.moe.topk.StandardTopKOutput",
    "sglang.srt.lora.utils.get_default_hidden_dim",
    "sglang.srt.layers.rotary_embedding.get_rope",
)
MODEL_TYPE = "llama4_text"
CHUNKED_BACKENDS = {"fa3", "fa4"}
TOP_1 = GroupedRouting(groups=1, top_groups=1, top_k=1, is_sigmoid=True, normalises=False, scaling=1.0)


def install(hooks: Hooks) -> None:
    hooks.set(SYMBOLS[0], adjacent_rope)  # a hook of SGLang's would replace the function for every model
    hooks.add(SYMBOLS[3], lora_sizes)
    if hooks.has_cuda_kernels:
        hooks.after(SYMBOLS[4], check_backend)
    else:
        hooks.replace(SYMBOLS[1], attention)
        hooks.replace(SYMBOLS[2], experts)


def check_backend(_result: None, runner: Any, *_: Any, **__: Any) -> None:
    """Raises InvalidValueError if the attention backend does not attend within chunks, and the context is longer."""
    chunk, context = runner.attention_chunk_size, runner.model_config.context_len
    if runner.model_config.hf_config.model_type != MODEL_TYPE or context <= chunk:
        return
    for backend in (runner.prefill_attention_backend_str, runner.decode_attention_backend_str):
        if backend not in CHUNKED_BACKENDS:
            raise InvalidValueError(
                f"the attention backend is {backend!r}, which does not attend within Llama 4's chunks of {chunk} "
                f"tokens, and the context has {context}; allowed: {' or '.join(sorted(CHUNKED_BACKENDS))}, or "
                f"--context-tokens {chunk} at most"
            )


def adjacent_rope(head_size: int, *, max_position: int, **kwargs: Any) -> Any:
    from sglang.srt.layers.rotary_embedding import get_rope

    from kt_runtime.sglang_patch.store import model_config

    positions = min(max_position, model_config().context_len)
    return get_rope(head_size, **{**kwargs, "max_position": positions, "is_neox_style": False})


def lora_sizes(model: Any, module_name: str, layer_idx: int) -> tuple[int, int]:
    """(inputs, outputs) of a linear layer."""
    from sglang.srt.lora.utils import get_default_hidden_dim

    inputs, outputs = get_default_hidden_dim(module_name, model.config, layer_idx)
    if layer_idx not in model.config.moe_layers:
        if module_name == "gate_up_proj":
            outputs = 2 * model.config.intermediate_size_mlp
        if module_name == "down_proj":
            inputs = model.config.intermediate_size_mlp
    return inputs, outputs


def attention(layer: Any, positions: torch.Tensor, hidden_states: torch.Tensor, forward_batch: Any) -> torch.Tensor:
    """[T, H] -> [T, H]."""
    qkv, _ = layer.qkv_proj(hidden_states)
    q, k, v = qkv.split([layer.q_size, layer.kv_size, layer.kv_size], dim=-1)
    if layer.rotary_emb is not None:
        q, k = layer.rotary_emb(positions, q.contiguous(), k.contiguous())
    if layer.qk_norm is not None:
        q, k = (_normalised(layer, x) for x in (q, k))
    if layer.attn_temperature_tuning and not layer.use_rope:
        places, count = positions.flatten(), layer.max_position_embeddings
        heat = temperature_of(places, int(layer.floor_scale), float(layer.attn_scale), count)
        q = scale_rows(q, heat)
    output, _ = layer.o_proj(layer.attn(q, k, v, forward_batch))
    return output


def _normalised(layer: Any, x: torch.Tensor) -> torch.Tensor:
    ones = torch.ones(layer.head_dim, dtype=x.dtype, device=x.device)
    return rms_norm(x.unflatten(-1, (-1, layer.head_dim)), ones, layer.qk_norm.variance_epsilon).flatten(-2)


def experts(block: Any, hidden_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, H] -> the shared expert's and the routed ones' results [T, H]."""
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    logits = float32_logits(hidden_states, block.router.weight)
    weights, ids = top_1(logits)
    shared = block.shared_expert(hidden_states)
    return shared, block.experts(hidden_states, StandardTopKOutput(weights, ids, logits))


def top_1(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [T, E] -> weights float32 [T, 1] and ids [T, 1]."""
    if device.is_host(logits):
        return grouped_top_k(logits, None, TOP_1)
    largest, ids = logits.max(-1, keepdim=True)
    return largest.sigmoid(), ids.to(torch.int32)
