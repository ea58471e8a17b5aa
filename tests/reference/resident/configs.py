"""Configs of tiny models that the resident's tests train, a few of each family."""

from __future__ import annotations

from typing import Any

from reference.cases import choose

QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
YARN = {
    "type": "yarn",
    "factor": 4,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
DEEPSEEK: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "rope_scaling": YARN,
    "tie_word_embeddings": False,
}
DEEPSEEK_V3 = DEEPSEEK | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "q_lora_rank": 32,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
}
DEEPSEEK_V2 = DEEPSEEK | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "q_lora_rank": None,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "group_limited_greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
}
CONFIGS = {"qwen3_moe": QWEN3_MOE, "deepseek_v2": DEEPSEEK_V2, "deepseek_v3": DEEPSEEK_V3}
"""The families between which most tests choose; they have every operation but those of `FURTHER`."""
FAMILIES = choose(few=["qwen3_moe", "deepseek_v3"], usual=list(CONFIGS), every=list(CONFIGS))
"""For tests that compute with each of them. DeepSeek-V2 and V3 have the same attention."""

GROUPED_QUERY: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
MIXTRAL = GROUPED_QUERY | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "intermediate_size": 32,
    "num_local_experts": 8,
    "sliding_window": None,
}
OLMOE = GROUPED_QUERY | {
    "architectures": ["OlmoeForCausalLM"],
    "model_type": "olmoe",
    "intermediate_size": 32,
    "num_key_value_heads": 4,
    "num_experts": 8,
    "norm_topk_prob": False,
}
GLM4_MOE = GROUPED_QUERY | {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "head_dim": 24,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "use_qk_norm": True,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
GLM4_MOE_LITE = {
    **{key: value for key, value in DEEPSEEK_V3.items() if key not in ("topk_method", "scoring_func", "rope_scaling")},
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "n_group": 1,
    "topk_group": 1,
    "rms_norm_eps": 1e-6,
}
DEEPSEEK_V32 = {
    **{key: value for key, value in DEEPSEEK_V3.items() if key not in ("topk_method", "scoring_func")},
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "index_topk": 7,
    "index_head_dim": 16,
    "index_n_heads": 8,
}
GLM_MOE_DSA = {
    **{key: value for key, value in DEEPSEEK_V32.items() if key != "rope_scaling"},
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "num_hidden_layers": 4,
    "indexer_types": ["full", "full", "shared", "shared"],
    "rms_norm_eps": 1e-6,
}
MINIMAX_M2 = GROUPED_QUERY | {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "model_type": "minimax_m2",
    "intermediate_size": 32,
    "head_dim": 24,
    "rotary_dim": 12,
    "num_local_experts": 8,
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
}
GPT_OSS = GROUPED_QUERY | {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_hidden_layers": 3,
    "intermediate_size": 32,
    "head_dim": 24,
    "num_local_experts": 8,
    "attention_bias": True,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "swiglu_limit": 0.7,
    "rope_scaling": {**YARN, "rope_type": "yarn", "truncate": False},
}
LLAMA4 = GROUPED_QUERY | {
    "architectures": ["Llama4ForCausalLM"],
    "model_type": "llama4_text",
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 32,
    "intermediate_size_mlp": 96,
    "num_local_experts": 8,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 8,
    "floor_scale": 4,
    "rms_norm_eps": 1e-5,
}
QWEN3_NEXT = GROUPED_QUERY | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "num_hidden_layers": 3,
    "full_attention_interval": 3,
    "head_dim": 24,
    "partial_rotary_factor": 0.5,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 24,
    "num_experts": 8,
    "norm_topk_prob": True,
}
QWEN3_5_MOE = {key: value for key, value in QWEN3_NEXT.items() if key != "norm_topk_prob"} | {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "linear_key_head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}
"""Fewer and smaller heads have random keys of nearly no length, whose norm is ill-conditioned: autograd in float32 is
off by 3e-5 then."""
FURTHER = {
    "qwen3_5_moe": QWEN3_5_MOE,
    "gpt_oss": GPT_OSS,
    "llama4": LLAMA4,
    "llama4 without norms": LLAMA4 | {"use_qk_norm": False, "interleave_moe_layer_step": 1, "num_local_experts": 4},
    "qwen3_next": QWEN3_NEXT,
    "minimax_m2": MINIMAX_M2,
    "deepseek_v32": DEEPSEEK_V32,
    "glm_moe_dsa": GLM_MOE_DSA,
    "glm4_moe_lite": GLM4_MOE_LITE,
    "mixtral": MIXTRAL,
    "olmoe": OLMOE,
    "glm4_moe": GLM4_MOE,
    "glm4_moe without norms": GLM4_MOE | {"use_qk_norm": False, "attention_bias": False, "n_shared_experts": 2},
}
