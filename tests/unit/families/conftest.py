from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "kv_lora_rank": 8,
    "q_lora_rank": 10,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 7,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "tie_word_embeddings": False,
}
DEEPSEEK_V2 = DEEPSEEK_V3 | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "n_group": 1,
}
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "tie_word_embeddings": False,
}
OLMOE = {
    "architectures": ["OlmoeForCausalLM"],
    "model_type": "olmoe",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": False,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
GLM4_MOE = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "partial_rotary_factor": 0.5,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "use_qk_norm": True,
    "attention_bias": True,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
GLM4_MOE_LITE = {
    **{key: value for key, value in DEEPSEEK_V3.items() if key not in ("topk_method", "scoring_func")},
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "n_group": 1,
    "topk_group": 1,
    "rms_norm_eps": 1e-5,
}
MINIMAX_M2 = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "model_type": "minimax_m2",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "rotary_dim": 6,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "attn_type_list": [1, 1],
    "tie_word_embeddings": False,
}
LLAMA4 = {
    "architectures": ["Llama4ForCausalLM"],
    "model_type": "llama4_text",
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "intermediate_size": 16,
    "intermediate_size_mlp": 48,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 8,
    "floor_scale": 4,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
CONFIGS = {
    "llama4": LLAMA4,
    "llama4 with experts in every layer": LLAMA4 | {"interleave_moe_layer_step": 1, "use_qk_norm": False},
    "minimax_m2": MINIMAX_M2,
    "glm4_moe_lite": GLM4_MOE_LITE,
    "mixtral": MIXTRAL,
    "olmoe": OLMOE,
    "glm4_moe": GLM4_MOE,
    "glm4_moe without norms and biases": GLM4_MOE | {"use_qk_norm": False, "attention_bias": False},
    "qwen3_moe": QWEN3_MOE,
    "qwen3_moe with biases": QWEN3_MOE | {"attention_bias": True},
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v3 with tied embeddings": DEEPSEEK_V3 | {"tie_word_embeddings": True},
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v2 without q_lora_rank": DEEPSEEK_V2 | {"q_lora_rank": None},
}


@pytest.fixture(params=CONFIGS)
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(CONFIGS[request.param])


@pytest.fixture
def config_of() -> Callable[[str], dict[str, Any]]:
    return lambda name: dict(CONFIGS[name])
