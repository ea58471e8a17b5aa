"""The linear-attention backend of Gated DeltaNet layers on a CPU, over SGLang's state pools.

Symbols (SGLang 0.5.23): `layers.attention.attention_registry.attn_backend_wrapper` wraps the attention backend for a
model with such layers. Reason: SGLang's backend computes with Triton kernels, or with those of its CPU library, which
its wheel does not have. `HybridLinearAttnBackend`, which hands each layer to the one or the other backend, stays
SGLang's. `configs.mamba_utils.BaseLinearStateParams.mamba_cache_per_req` and the pools read the states' dtypes from
`mamba2_cache_params`: the convolution's inputs are kept in the model's dtype, which is exact, instead of bfloat16.

A batch is one call for a layer (`kt_runtime.experts.attention.gated_delta`): the new tokens of each sequence after the
state in its slot. A sequence without cached tokens begins with zeros, whatever the slot holds. A token's result does
not depend on the other sequences, on how its prompt was cut, or on what was cached.

States are kept where SGLang's radix cache for them says, by adapter as keys and values are (`cache/keys.py`): with its
strategy `no_buffer`, at the ends of requests and of chunks of prompts. There is no host or disk tier for them
(`arguments.py`).
"""

from __future__ import annotations

import os
from typing import Any

import torch

from kt_runtime.experts.attention import DeltaHeads, DeltaStates, gated_delta
from kt_runtime.sglang_patch.delta.layers import weights_of
from kt_runtime.sglang_patch.hooks import Hooks

SYMBOLS = (
    "sglang.srt.layers.attention.attention_registry.attn_backend_wrapper",
    "sglang.srt.model_executor.model_runner.ModelRunner.initialize",
    "sglang.srt.configs.hybrid_arch.hybrid_gdn_config",
    "sglang.srt.configs.mamba_utils.mamba2_state_dtype",
    "sglang.srt.layers.attention.base_attn_backend.AttentionBackend",
    "sglang.srt.layers.attention.hybrid_linear_attn_backend.HybridLinearAttnBackend",
    "sglang.srt.mem_cache.memory_pool.HybridReqToTokenPool",
    "sglang.srt.mem_cache.memory_pool.HybridLinearKVPool",
)
DTYPE_OF_INPUTS = "SGLANG_MAMBA_CONV_DTYPE"  # what `mamba2_state_dtype` reads


def install(hooks: Hooks) -> None:
    if hooks.on_cpu:
        hooks.around(SYMBOLS[0], wrapped)
        hooks.before(SYMBOLS[1], _keep_inputs_in_the_model_s_dtype)


def wrapped(original: Any, runner: Any, full_attn_backend: Any) -> Any:
    from sglang.srt.configs.hybrid_arch import hybrid_gdn_config

    config = hybrid_gdn_config(runner.model_config)
    if config is None:
        return original(runner, full_attn_backend)
    from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend

    return HybridLinearAttnBackend(full_attn_backend, _backend_class()(runner), config.full_attention_layer_ids)


def _keep_inputs_in_the_model_s_dtype(runner: Any, *args: Any, **kwargs: Any) -> None:
    os.environ[DTYPE_OF_INPUTS] = str(runner.model_config.dtype).removeprefix("torch.")


def sequences_of(slots: torch.Tensor, prefix_lens: list[int], extend_lens: list[int]) -> torch.Tensor:
    """int64 [B, 4] as `gated_delta` takes them: the new tokens adjoin."""
    counts = torch.tensor(extend_lens, dtype=torch.int64)
    continues = (torch.tensor(prefix_lens, dtype=torch.int64) > 0).long()
    return torch.stack([counts.cumsum(0) - counts, counts, slots.long(), continues], dim=1)


def kept_in(pool: Any, layer: int, heads: DeltaHeads) -> DeltaStates:
    """What SGLang's pool of requests keeps of a layer, in place."""
    found = pool.mamba2_layer_cache(layer)
    return DeltaStates(found.conv[0], found.temporal.view(-1, heads.value_heads, heads.key_size, heads.value_size))


def _backend_class() -> type:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

    class CpuDeltaBackend(AttentionBackend):
        """Its only state is the plan of the current batch."""

        needs_cpu_seq_lens = False

        def __init__(self, runner: Any) -> None:
            super().__init__()
            self.req_to_token_pool = runner.req_to_token_pool
            self.token_to_kv_pool = runner.token_to_kv_pool
            self.forward_metadata: Any = None

        def supports_prefill_graph_extend(self) -> bool:
            return False

        def init_forward_metadata(self, forward_batch: Any) -> None:
            mode, pool = forward_batch.forward_mode, self.req_to_token_pool
            if mode.is_idle():
                self.forward_metadata = None
                return
            slots = pool.translate_mamba_indices(pool.get_mamba_indices(forward_batch.req_pool_indices))
            count = len(slots)
            if mode.is_decode():
                self.forward_metadata = sequences_of(slots, [1] * count, [1] * count)
            else:
                prefix, new = forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu
                self.forward_metadata = sequences_of(slots, list(map(int, prefix)), list(map(int, new)))

        def forward_extend(
            self, *, layer: Any, mixed_qkv: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **_: Any
        ) -> torch.Tensor:
            """mixed_qkv [T, C], a and b [T, HV] -> [T, HV, V]. Changes the states of the batch's sequences."""
            weights = weights_of(layer)
            heads, kept = weights.heads, kept_in(self.req_to_token_pool, layer.layer_id, weights.heads)
            out = gated_delta(mixed_qkv, a, b, weights, self.forward_metadata, kept)
            return out.view(len(out), heads.value_heads, heads.value_size)

        forward_decode = forward_extend

        def support_triton(self) -> bool:
            return False

    return CpuDeltaBackend
