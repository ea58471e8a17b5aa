"""OLMoE: attention with norms over all of a token's queries and keys, a softmax router, no shared experts.

Hugging Face: `transformers.models.olmoe`. SGLang: `sglang.srt.models.olmoe`, which has some settings of the published
models in its code: they are required here.
"""

from __future__ import annotations

from kt_runtime.errors import InvalidValueError
from kt_runtime.families.base import Config, integer, require
from kt_runtime.families.models.grouped_query import GroupedQueryFamily, require_plain_rotary
from kt_runtime.families.traits import GROUPED_QUERY, SOFTMAX, Traits

EPSILON = 1e-5


class Olmoe(GroupedQueryFamily):
    name = "olmoe"
    model_types = ("olmoe",)
    architectures = ("OlmoeForCausalLM",)
    traits = Traits(GROUPED_QUERY, SOFTMAX, shared_experts=False, dense_first_layers=False)
    gguf_architecture = "olmoe"
    splits_over_ranks = True
    default_epsilon = EPSILON

    def check(self, config: Config) -> None:
        fixed = "SGLang 0.5.23's OLMoE is written for the published models, which have this value"
        require(config, "rms_norm_eps", EPSILON, fixed, default=EPSILON)
        require(config, "norm_topk_prob", False, fixed, default=False)
        require(config, "clip_qkv", None, "SGLang 0.5.23's OLMoE does not clip queries, keys and values")
        require(config, "attention_bias", False, "SGLang 0.5.23's OLMoE attention has no biases", default=False)
        require(config, "tie_word_embeddings", False, "SGLang 0.5.23 never ties OLMoE's lm_head", default=False)
        require(config, "hidden_act", "silu", "the expert kernels compute SwiGLU", default="silu")
        require_plain_rotary(config, "the twin's tables were compared with SGLang's for this one only")
        query, key = self.widths(config)
        if query != key or query != integer(config, "hidden_size"):
            raise InvalidValueError(
                f"config.json: 'num_key_value_heads' is {config.get('num_key_value_heads')!r} of "
                f"{config.get('num_attention_heads')!r} heads; both must be equal, and all keys together as wide as "
                "the hidden state: SGLang 0.5.23's norms have that size"
            )

    def attention_norms(self, config: Config) -> dict[str, int]:
        query, key = self.widths(config)
        return {"self_attn.q_norm": query, "self_attn.k_norm": key}

    def num_experts(self, config: Config) -> int:
        return integer(config, "num_experts", "num_local_experts")

    def expert_intermediate(self, config: Config) -> int:
        return integer(config, "intermediate_size")
