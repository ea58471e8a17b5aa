"""Qwen3-MoE: grouped-query attention with norms on each head's queries and keys, routed experts in every layer.

Hugging Face: `transformers.models.qwen3_moe`. SGLang: `sglang.srt.models.qwen3_moe`.
"""

from __future__ import annotations

from kt_runtime.errors import InvalidValueError
from kt_runtime.families.base import Config, integer, require
from kt_runtime.families.models.grouped_query import GroupedQueryFamily
from kt_runtime.families.traits import GROUPED_QUERY, SOFTMAX, Traits


class Qwen3Moe(GroupedQueryFamily):
    name = "qwen3_moe"
    model_types = ("qwen3_moe",)
    architectures = ("Qwen3MoeForCausalLM",)
    traits = Traits(GROUPED_QUERY, SOFTMAX, shared_experts=False, dense_first_layers=False)
    gguf_architecture = "qwen3moe"
    splits_over_ranks = True

    def check(self, config: Config) -> None:
        if config.get("mlp_only_layers"):
            raise InvalidValueError(
                f"config.json: 'mlp_only_layers' is {config['mlp_only_layers']!r}; only an empty list can be used: "
                "SGLang 0.5.23 builds routed experts in every Qwen3-MoE layer"
            )
        require(config, "decoder_sparse_step", 1, "SGLang 0.5.23 builds routed experts in every layer", default=1)
        require(config, "tie_word_embeddings", False, "SGLang 0.5.23 never ties Qwen3-MoE's lm_head", default=False)
        require(config, "hidden_act", "silu", "the expert kernels compute SwiGLU", default="silu")

    def has_qkv_bias(self, config: Config) -> bool:
        return bool(config.get("attention_bias", False))

    def has_out_bias(self, config: Config) -> bool:
        return self.has_qkv_bias(config)

    def attention_norms(self, config: Config) -> dict[str, int]:
        return {"self_attn.q_norm": self.head_dim(config), "self_attn.k_norm": self.head_dim(config)}

    def num_experts(self, config: Config) -> int:
        # transformers 5 writes `num_local_experts`, older versions `num_experts`.
        return integer(config, "num_experts", "num_local_experts")
