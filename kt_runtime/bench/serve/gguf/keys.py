"""The keys of a GGUF file of a model.

What llama.cpp reads: src/models/qwen3moe.cpp, deepseek2.cpp, llama.cpp, olmoe.cpp, openai-moe.cpp, qwen3next.cpp,
qwen35moe.cpp, llama4.cpp, glm4-moe.cpp, minimax-m2.cpp, deepseek32.cpp and glm-dsa.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kt_runtime.bench.serve.gguf.mix import FILE_TYPES
from kt_runtime.errors import CheckpointError
from kt_runtime.families import family_for
from kt_runtime.families.base import integer
from kt_runtime.families.models.deepseek_v32 import FULL, GlmMoeDsa

if TYPE_CHECKING:
    import gguf

WITHOUT_EXPERT_SIZE = ("llama", "olmoe")  # feed_forward_length is the experts' there
ROTATED: Mapping[str, Callable[[Mapping[str, Any], int], int]] = {
    "llama": lambda config, head: head,
    "llama4": lambda config, head: head,
    "glm4moe": lambda config, head: int(head * config["partial_rotary_factor"]),
    "minimax-m2": lambda config, head: int(config["rotary_dim"]),
}
"""Rotated elements of a head, by architecture, for those that have a key for it. `head`: its size."""


def add_keys(writer: gguf.GGUFWriter, config: Mapping[str, Any], mix: str) -> None:
    """Raises CheckpointError for a config without a key that the file needs, and for another rotary embedding than
    llama.cpp's."""
    import gguf

    family = family_for(config)
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_file_type(gguf.LlamaFileType[FILE_TYPES[mix]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(integer(config, "vocab_size"))
    writer.add_block_count(integer(config, "num_hidden_layers"))
    writer.add_context_length(integer(config, "max_position_embeddings"))
    writer.add_embedding_length(integer(config, "hidden_size"))
    _add_intermediate_sizes(writer, config)
    writer.add_head_count(integer(config, "num_attention_heads"))
    _add_rope(writer, config)
    writer.add_layer_norm_rms_eps(float(config["rms_norm_eps"]))
    writer.add_expert_count(family.num_experts(config))
    writer.add_expert_used_count(family.num_experts_per_tok(config))
    if config.get("kv_lora_rank"):
        _add_latent_keys(writer, config)
        _add_router_keys(writer, config)
        if family.chooses_keys:
            _add_indexer_keys(writer, config)
        return
    writer.add_head_count_kv(integer(config, "num_key_value_heads"))
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if family.gguf_architecture in ROTATED:
        writer.add_rope_dimension_count(ROTATED[family.gguf_architecture](config, head_dim))
    if family.gguf_architecture == "glm4moe":
        _add_router_keys(writer, config)
    if family.gguf_architecture == "minimax-m2":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if family.gguf_architecture == "llama4":
        writer.add_interleave_moe_layer_step(integer(config, "interleave_moe_layer_step"))
    if family.gguf_architecture == "gpt-oss":
        writer.add_sliding_window(integer(config, "sliding_window"))
        windows = [bool(family.window(config, layer)) for layer in range(integer(config, "num_hidden_layers"))]
        if any(window == bool(layer % 2) for layer, window in enumerate(windows)):
            writer.add_sliding_window_pattern(windows)
    if family.keeps_states:
        _add_delta_net_keys(writer, config, head_dim)


def _add_intermediate_sizes(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    family = family_for(config)
    dense = "intermediate_size_mlp" if family.gguf_architecture == "llama4" else "intermediate_size"
    if config.get(dense) is not None or not family.keeps_states:  # Qwen3.5 has no dense MLP
        writer.add_feed_forward_length(integer(config, dense))
    if family.gguf_architecture not in WITHOUT_EXPERT_SIZE:
        writer.add_expert_feed_forward_length(family.expert_intermediate(config))
    if family.keeps_states:
        writer.add_expert_shared_feed_forward_length(integer(config, "shared_expert_intermediate_size"))


def _add_delta_net_keys(writer: gguf.GGUFWriter, config: Mapping[str, Any], head_dim: int) -> None:
    values, value = integer(config, "linear_num_value_heads"), integer(config, "linear_value_head_dim")
    writer.add_ssm_conv_kernel(integer(config, "linear_conv_kernel_dim"))
    writer.add_ssm_state_size(integer(config, "linear_key_head_dim"))
    writer.add_ssm_group_count(integer(config, "linear_num_key_heads"))
    writer.add_ssm_time_step_rank(values)
    writer.add_ssm_inner_size(values * value)
    writer.add_full_attention_interval(integer({"full_attention_interval": 4, **config}, "full_attention_interval"))
    rope = config.get("rope_parameters") or {}
    part = config.get("partial_rotary_factor", rope.get("partial_rotary_factor", 0.25))
    writer.add_rope_dimension_count(int(head_dim * part))
    if sections := rope.get("mrope_section"):
        writer.add_rope_dimension_sections([*sections, 0])


def _add_latent_keys(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """Latent attention counts as one head for keys and values; its own sizes are the `_mla` keys."""
    latent, rope = integer(config, "kv_lora_rank"), integer(config, "qk_rope_head_dim")
    writer.add_head_count_kv(1)
    writer.add_kv_lora_rank(latent)
    writer.add_key_length(latent + rope)
    writer.add_value_length(latent)
    writer.add_key_length_mla(integer(config, "qk_nope_head_dim") + rope)
    writer.add_value_length_mla(integer(config, "v_head_dim"))
    writer.add_rope_dimension_count(rope)
    if config.get("q_lora_rank"):
        writer.add_q_lora_rank(integer(config, "q_lora_rank"))


def _add_indexer_keys(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """`indexer.types`, true for a layer with an indexer of its own: the `gguf` package 0.19 has no method for it."""
    writer.add_indexer_head_count(integer(config, "index_n_heads"))
    writer.add_indexer_key_length(integer(config, "index_head_dim"))
    writer.add_indexer_top_k(integer(config, "index_topk"))
    family = family_for(config)
    if isinstance(family, GlmMoeDsa):
        has_own = [kind == FULL for kind in family.indexer_types(config)]
        writer.add_array(f"{family.gguf_architecture}.attention.indexer.types", has_own)


def _add_router_keys(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """Router keys of families with leading dense layers and shared experts. GLM's configs lack `scoring_func`."""
    import gguf

    writer.add_leading_dense_block_count(int(config["first_k_dense_replace"]))
    writer.add_expert_shared_count(integer(config, "n_shared_experts"))
    writer.add_expert_weights_scale(float(config.get("routed_scaling_factor", 1.0)))
    writer.add_expert_weights_norm(bool(config.get("norm_topk_prob")))
    if config.get("n_group"):
        writer.add_expert_group_count(integer(config, "n_group"))
        writer.add_expert_group_used_count(integer(config, "topk_group"))
    kinds = gguf.ExpertGatingFuncType
    writer.add_expert_gating_func(kinds.SIGMOID if family_for(config).has_correction_bias(config) else kinds.SOFTMAX)


def _add_rope(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """transformers 5 writes `rope_parameters`, earlier versions `rope_theta` and `rope_scaling`."""
    import gguf

    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta, kind = config.get("rope_theta", scaling.get("rope_theta")), scaling.get("rope_type", scaling.get("type"))
    if theta is None:
        raise CheckpointError("config.json: 'rope_theta' is missing; a GGUF file has it")
    writer.add_rope_freq_base(float(theta))
    if kind in (None, "default") or (kind == "llama3" and family_for(config).gguf_architecture == "llama4"):
        return  # llama3: a tensor has it, rope_freqs
    if kind != "yarn":
        raise CheckpointError(f"config.json: the rope is {kind!r}; a GGUF file is written with yarn or without scaling")
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(float(scaling["factor"]))
    writer.add_rope_scaling_orig_ctx_len(int(scaling["original_max_position_embeddings"]))
    writer.add_rope_scaling_yarn_beta_fast(float(scaling.get("beta_fast", 32)))
    writer.add_rope_scaling_yarn_beta_slow(float(scaling.get("beta_slow", 1)))
    if scaling.get("mscale_all_dim"):
        # llama.cpp's deepseek2 divides this key by 0.1.
        writer.add_rope_scaling_yarn_log_mul(0.1 * float(scaling["mscale_all_dim"]))
