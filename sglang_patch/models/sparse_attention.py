"""DeepSeek-V3.2 and GLM-5 on a CPU: the indexer's module, and the KV pool with its keys.

Symbols (SGLang 0.5.23), on a CPU:

- `configs.model_config._hf_attr`, by which SGLang recognises such a model (`is_deepseek_dsa`). For these it answers
  that there is no `index_topk`. Reason: all that SGLang then does is for its CUDA kernels: the attention backend `dsa`,
  pages of 64 tokens, a pool of index keys in fp8, and an indexer that needs them. What remains is a DeepSeek-V3.
- `models.deepseek_v2.DeepseekV2AttentionMLA.__init__`: then gives the layer an indexer of kt-runtime's, with SGLang's
  names of parameters. SGLang's forward methods call it where the layer says `use_dsa`, and hand its choice to the
  attention backend (`cpu/attention.py`). The native step computes it in csrc/step/latent.cpp, with the same bits.
- `models.deepseek_v2.get_rope_wrapper`: on a CPU SGLang knows this model's rotary embedding with YaRN only; GLM-5 has a
  plain one.
- The platform's `get_kv_pool_cls` (`platform.py`): SGLang's pool of latents, whose rows have the index key behind
  latent and rotary key. So whatever moves rows moves index keys too: the cache's host and disk tiers, and retraction.

On an accelerator the models are refused (`sparse_options.py`): training could not follow what SGLang's kernels round
to fp8.

Shapes: T tokens, H hidden, M heads of E elements, K keys that a query sees.
"""

from __future__ import annotations

from typing import Any

import torch

from kt_runtime.errors import InvalidValueError
from kt_runtime.experts.attention import select_keys
from kt_runtime.experts.dense import DTYPES
from kt_runtime.families import family_for
from kt_runtime.families.models.deepseek_v32 import SHARED, DeepseekV32
from kt_runtime.ops.indexer import IndexerWeights, index_rows
from kt_runtime.sglang_patch.faults import finite_rows
from kt_runtime.sglang_patch.hooks import Hooks
from kt_runtime.sglang_patch.store import model_config

SYMBOLS = (
    "sglang.srt.configs.model_config._hf_attr",
    "sglang.srt.models.deepseek_v2.DeepseekV2AttentionMLA.__init__",
    "sglang.srt.models.deepseek_v2.get_rope_wrapper",
    "sglang.srt.layers.linear.ReplicatedLinear",
    "sglang.srt.layers.rotary_embedding.get_rope",
    "sglang.srt.layers.rotary_embedding.get_rope_wrapper",
    "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool",
    "sglang.srt.model_executor.forward_context.get_attn_backend",
    "sglang.srt.model_executor.forward_context.get_token_to_kv_pool",
)
RECOGNISED_BY = "index_topk"
ARCHITECTURES = ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")


def install(hooks: Hooks) -> None:
    if hooks.on_cpu:
        hooks.around(SYMBOLS[0], attribute)
        hooks.after(SYMBOLS[1], add_indexer)
        hooks.set(SYMBOLS[2], rope)


def attribute(original: Any, config: Any, name: str) -> Any:
    found = original(config, name)
    if name == RECOGNISED_BY and set(original(config, "architectures") or ()) & set(ARCHITECTURES):
        return None
    return found


def rope(head_size: int, *, device: str | None = None, rope_scaling: Any = None, **kwargs: Any) -> Any:
    from sglang.srt.layers.rotary_embedding import get_rope, get_rope_wrapper

    if rope_scaling is None:
        return get_rope(head_size, **kwargs)
    return get_rope_wrapper(head_size, device=device, rope_scaling=rope_scaling, **kwargs)


def add_indexer(_result: None, attention: Any, config: Any, *_: Any, **kwargs: Any) -> None:
    values = config.to_dict()
    family = family_for(values) if set(config.architectures or ()) & set(ARCHITECTURES) else None
    if not isinstance(family, DeepseekV32):
        return
    types = [*family.indexer_types(values), ""]
    layer = attention.layer_id
    attention.use_dsa = True
    attention.skip_topk, attention.next_skip_topk = types[layer] == SHARED, types[layer + 1] == SHARED
    if not attention.skip_topk:
        attention.indexer = _indexer_class()(attention, values, kwargs["quant_config"], family)


def _indexer_class() -> type:
    from sglang.srt.layers.linear import ReplicatedLinear
    from sglang.srt.model_executor.forward_context import get_attn_backend, get_token_to_kv_pool

    class CpuIndexer(torch.nn.Module):
        """Its parameters have SGLang's names; the rotary embedding is the layer's own."""

        def __init__(self, attention: Any, config: dict[str, Any], quantization: Any, family: DeepseekV32) -> None:
            super().__init__()
            heads, size, hidden = config["index_n_heads"], config["index_head_dim"], config["hidden_size"]
            self.top_k, self._interleaved = config["index_topk"], family.indexer_rotates_adjacent
            self._rotary = (attention.rotary_emb,)  # in a tuple, since it is the layer's module
            self.wq_b = ReplicatedLinear(attention.q_lora_rank, heads * size, bias=False, quant_config=quantization)
            self.wk = ReplicatedLinear(hidden, size, bias=False, quant_config=quantization)
            self.k_norm = torch.nn.LayerNorm(size, eps=1e-6, dtype=torch.float32)
            self.weights_proj = ReplicatedLinear(hidden, heads, bias=False, params_dtype=torch.float32)

        def forward(
            self, x: torch.Tensor, q_lora: torch.Tensor, positions: torch.Tensor, forward_batch: Any, layer_id: int
        ) -> torch.Tensor | None:
            """x [T, H] and compressed queries [T, rank] -> the choice [T, K]; None: every query sees all keys."""
            pool = get_token_to_kv_pool()
            angles = self._rotary[0].cos_sin_cache.to(x.dtype)
            q, k, weights = index_rows(x, q_lora.contiguous(), self._weights(), angles, positions.long())
            notes = finite_rows.present()
            if notes is not None and notes.has_adapters:
                k = finite_rows.masked(k)
            keys = pool.index_keys(layer_id)
            keys[forward_batch.out_cache_loc] = k
            return select_keys(q, weights, keys, get_attn_backend().forward_metadata, self.top_k)

        def _weights(self) -> IndexerWeights:
            norm = self.k_norm
            projections = self.wq_b.weight.detach(), self.wk.weight.detach()
            norms = norm.weight.detach(), norm.bias.detach()
            return IndexerWeights(*projections, *norms, self.weights_proj.weight.detach(), self._interleaved)

    return CpuIndexer


def pool_class() -> type | None:
    """SGLang's pool for the process's model; None: SGLang's own class."""
    values = model_config().hf_config.to_dict()
    if not set(values.get("architectures") or ()) & set(ARCHITECTURES):
        return None
    family, width = family_for(values), int(values["qk_rope_head_dim"])
    return _pool_class(width, family.index_size(values))


def _pool_class(rope: int, index_size: int) -> type:
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    class IndexedPool(MLATokenToKVPool):
        """Rows of latent, rotary key and index key. For SGLang's code the last two are one."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "qk_rope_head_dim": rope + index_size})
            if self.store_dtype not in DTYPES:
                raise InvalidValueError(f"index keys are kept in the model's dtype, not in {self.store_dtype}")
            self._seen = self.kv_lora_rank + rope

        def get_key_buffer(self, layer_id: int) -> torch.Tensor:
            """[slots, 1, latent + rope]."""
            return super().get_key_buffer(layer_id)[..., : self._seen]

        def index_keys(self, layer_id: int) -> torch.Tensor:
            """[slots, E], the rows' last elements."""
            return super().get_key_buffer(layer_id)[:, 0, self._seen :]

        def set_kv_buffer(self, layer: Any, loc_info: Any, cache_k: torch.Tensor, cache_v: Any, **_: Any) -> None:
            from sglang.srt.mem_cache.memory_pool import unwrap_write_loc

            slots = unwrap_write_loc(loc_info)[0]
            super().get_key_buffer(layer.layer_id)[slots, :, : self._seen] = cache_k.to(self.dtype)

    return IndexedPool
