"""Mixtral: grouped-query attention without norms of queries and keys, a softmax router, no shared experts.

Hugging Face: `transformers.models.mixtral`. SGLang: `sglang.srt.models.mixtral`. Checkpoints and SGLang call the MLP
`block_sparse_moe`, and checkpoints an expert's projections w1 (gate), w3 (up) and w2 (down).
"""

from __future__ import annotations

from typing import Any

from kt_runtime.families.base import Config, integer, require
from kt_runtime.families.models.grouped_query import GroupedQueryFamily, require_plain_rotary
from kt_runtime.families.naming import Renaming
from kt_runtime.families.traits import GROUPED_QUERY, SOFTMAX, Traits

SHORT_NAMES = (
    Renaming(".experts.{}.w1.", ".experts.{}.gate_proj."),
    Renaming(".experts.{}.w3.", ".experts.{}.up_proj."),
    Renaming(".experts.{}.w2.", ".experts.{}.down_proj."),
    Renaming(".block_sparse_moe.", ".mlp."),
)
"""Mixtral's names, which MiniMax uses too."""


class Mixtral(GroupedQueryFamily):
    name = "mixtral"
    model_types = ("mixtral",)
    architectures = ("MixtralForCausalLM",)
    traits = Traits(GROUPED_QUERY, SOFTMAX, shared_experts=False, dense_first_layers=False)
    gguf_architecture = "llama"  # llama.cpp has Mixtral as a Llama with experts
    splits_over_ranks = True
    renamings = SHORT_NAMES
    default_epsilon = 1e-5

    def check(self, config: Config) -> None:
        require(config, "sliding_window", None, "SGLang 0.5.23's Mixtral attends to the whole prefix")
        require(config, "tie_word_embeddings", False, "SGLang 0.5.23 never ties Mixtral's lm_head", default=False)
        require(config, "hidden_act", "silu", "the expert kernels compute SwiGLU", default="silu")
        require_plain_rotary(config, "SGLang 0.5.23's Mixtral ignores any other rotary embedding")
        size = integer(config, "hidden_size") // integer(config, "num_attention_heads")
        if config.get("head_dim") is not None:
            require(config, "head_dim", size, "SGLang 0.5.23 divides hidden_size by num_attention_heads")

    def missing_keys(self, config: Config) -> dict[str, Any]:
        # SGLang's LoRA pool takes this key as it is, and transformers writes null.
        return {} if config.get("head_dim") is not None else {"head_dim": self.head_dim(config)}

    def normalises(self, config: Config) -> bool:
        return True

    def num_experts(self, config: Config) -> int:
        return integer(config, "num_local_experts", "num_experts")

    def expert_intermediate(self, config: Config) -> int:
        return integer(config, "intermediate_size")
