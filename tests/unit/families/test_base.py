"""Names and shapes against Hugging Face's own models, built on the meta device."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from kt_runtime.errors import InvalidValueError
from kt_runtime.families import LoraModule, family_for

ConfigOf = Callable[[str], dict[str, Any]]


def build(config: Mapping[str, Any]) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))


def is_expert(name: str) -> bool:
    return ".experts." in name


def test_twin_sources_are_exactly_the_parameters_of_the_hugging_face_model(config: dict[str, Any]) -> None:
    model = build(config)
    expected = {
        name: tuple(parameter.shape)
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if not is_expert(name)
    }
    sources = family_for(config).twin_sources(config)
    assert {source.name: source.shape for source in sources if not source.is_buffer} == expected
    assert len({source.name for source in sources}) == len(sources)


def test_twin_sources_are_exactly_the_persistent_buffers_of_the_hugging_face_model(config: dict[str, Any]) -> None:
    model = build(config)
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items() if name not in parameters}
    sources = family_for(config).twin_sources(config)
    assert {source.name: source.shape for source in sources if source.is_buffer} == expected


def test_the_rows_of_each_sglang_tensor_are_used_once_and_without_gaps(config: dict[str, Any]) -> None:
    rows = defaultdict(list)
    for source in family_for(config).twin_sources(config):
        assert source.stop - source.start == source.shape[0]
        rows[source.source].append((source.start, source.stop))
    if config["tie_word_embeddings"]:
        assert len(rows.pop("model.embed_tokens.weight")) == 2
    for spans in rows.values():
        spans.sort()
        assert spans[0][0] == 0
        assert all(before[1] == after[0] for before, after in itertools.pairwise(spans))


NOT_ADAPTED = ("lm_head", "shared_expert_gate", "wq_b", "wk", "weights_proj")


def test_lora_modules_are_made_once_for_equal_configs(config: dict[str, Any]) -> None:
    """Loading an adapter asks a dozen times. What one caller does to the list, others do not see."""
    family = family_for(config)
    first, again = family.lora_modules(config), family.lora_modules(dict(config))
    assert first == again and all(one is other for one, other in zip(first, again, strict=True))
    first.clear()
    assert family.lora_modules(config) == again
    size = "moe_intermediate_size" if "moe_intermediate_size" in config else "intermediate_size"
    assert family.lora_modules(config | {size: 2 * config[size]}) != again
    unusual = config | {"not of a file": object()}
    assert family.lora_modules(unusual) == again


def test_lora_modules_are_exactly_the_linears_but_lm_head(config: dict[str, Any]) -> None:
    model = build(config)
    linears = {
        name: (module.in_features, module.out_features)
        for name, module in model.named_modules()
        if type(module) is nn.Linear and name.rpartition(".")[2] not in NOT_ADAPTED
    }
    dense = [module for module in family_for(config).lora_modules(config) if not module.num_experts]
    assert {module.name: (module.in_features, module.out_features) for module in dense} == linears


def test_expert_modules_match_the_shapes_of_the_fused_experts(config: dict[str, Any]) -> None:
    model, family = build(config), family_for(config)
    routed = {module.name: module for module in family.lora_modules(config) if module.num_experts}
    mlps = [getattr(block, family.mlp_name) for block in model.model.layers]
    layers = [layer for layer, mlp in enumerate(mlps) if hasattr(mlp, "experts")]
    assert family.moe_layers(config) == layers
    assert len(routed) == 3 * len(layers)
    for layer in layers:
        experts = model.get_submodule(family.expert_prefix(layer))
        count, hidden, intermediate = family.expert_shape(config)
        mlp = family.expert_mlp(config)
        fused = (experts.gate_up_proj, experts.down_proj)
        both, down_proj = (tensor.mT if mlp.is_transposed else tensor for tensor in fused)
        assert both.shape == (count, 2 * intermediate, hidden)
        assert down_proj.shape == (count, hidden, intermediate)
        assert hasattr(experts, "down_proj_bias") == mlp.has_bias
        for projection in ("gate_proj", "up_proj"):
            module = routed[f"{family.expert_prefix(layer)}.{projection}"]
            assert (module.num_experts, module.out_features, module.in_features) == (count, intermediate, hidden)
            assert module.layer == layer
        down = routed[f"{family.expert_prefix(layer)}.down_proj"]
        assert (down.num_experts, down.out_features, down.in_features) == (count, hidden, intermediate)
    assert family.num_experts_per_tok(config) == config["num_experts_per_tok"]


def test_fused_groups_name_sglang_modules(config_of: ConfigOf) -> None:
    def group(config: dict[str, Any], source: str) -> list[LoraModule]:
        return [module for module in family_for(config).lora_modules(config) if module.source.endswith(source)]

    qkv = group(config_of("qwen3_moe"), "layers.0.self_attn.qkv_proj")
    assert [(module.projection, module.start, module.stop) for module in qkv] == [
        ("q_proj", 0, 48),
        ("k_proj", 48, 72),
        ("v_proj", 72, 96),
    ]
    latent = group(config_of("deepseek_v3"), "layers.0.self_attn.fused_qkv_a_proj_with_mqa")
    assert [module.projection for module in latent] == ["q_a_proj", "kv_a_proj_with_mqa"]
    experts = group(config_of("deepseek_v3"), "layers.1.mlp.experts.w13")
    assert [(module.projection, module.start, module.stop) for module in experts] == [
        ("gate_proj", 0, 16),
        ("up_proj", 16, 32),
    ]
    assert experts[0].expert_name(3) == "model.layers.1.mlp.experts.3.gate_proj"


def test_sglang_targets_never_name_router_embeddings_or_head(config: dict[str, Any]) -> None:
    targets = family_for(config).sglang_lora_targets(config)
    assert {"gate_proj", "up_proj", "down_proj", "o_proj"} <= set(targets)
    assert not {"gate", "embed_tokens", "lm_head", "all"} & set(targets)


def strings(value: Any) -> set[str]:
    """Those in a table: a dataclass of strings, numbers, tuples and other tables."""
    if isinstance(value, str):
        return {value}
    parts = value if isinstance(value, tuple) else ()
    if is_dataclass(value):
        parts = tuple(getattr(value, field.name) for field in fields(value))
    return set().union(*map(strings, parts))


def test_a_decoder_stack_names_the_tensors_of_the_twin_but_the_head(config: dict[str, Any]) -> None:
    family = family_for(config)
    stack = family.decoder_stack(config)
    assert stack is not None and stack.epsilon == config.get("rms_norm_eps", 1e-6)
    assert [layer.routed.experts for layer in stack.layers if layer.routed is not None] == family.moe_layers(config)
    names = {re.sub(r"\.w_[kv]c$", ".kv_b_proj.weight", name) for name in strings(stack)}
    sources = {source.source for source in family.twin_sources(config)}
    assert names == sources - {"lm_head.weight"}


def test_configs_as_transformers_saves_them_give_the_same_tables(config: dict[str, Any]) -> None:
    saved = AutoConfig.for_model(**config).to_dict()
    family = family_for(config)
    assert family.twin_sources(saved) == family.twin_sources(config)
    assert family.lora_modules(saved) == family.lora_modules(config)
    assert family.decoder_stack(saved) == family.decoder_stack(config)


@pytest.mark.parametrize(
    ("base", "key", "value"),
    [
        ("qwen3_next", "mlp_only_layers", [0]),
        ("qwen3_next", "attn_output_gate", False),
        ("qwen3_next", "mamba_ssm_dtype", "bfloat16"),
        ("qwen3_next", "linear_num_value_heads", 3),
        ("qwen3_next", "linear_conv_kernel_dim", 9),
        ("qwen3_next", "linear_key_head_dim", None),
        ("qwen3_next", "shared_expert_intermediate_size", None),
        ("qwen3_next", "full_attention_interval", 5),
        ("qwen3_next", "layer_types", ["full_attention"] * 3),
        ("qwen3_next", "rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
        ("qwen3_5_moe", "norm_topk_prob", False),
        ("qwen3_5_moe", "is_causal", False),
        ("qwen3_5_moe", "output_gate_type", "sigmoid"),
        ("qwen3_5_moe", "tie_word_embeddings", True),
        ("qwen3_5_moe", "linear_num_value_heads", 3),
        ("qwen3_5_moe", "rope_parameters", {"rope_type": "yarn", "factor": 4.0}),
        ("qwen3_moe", "mlp_only_layers", [0]),
        ("qwen3_moe", "decoder_sparse_step", 2),
        ("qwen3_moe", "tie_word_embeddings", True),
        ("qwen3_moe", "hidden_size", None),
        ("qwen3_moe", "num_attention_heads", "four"),
        ("deepseek_v3", "moe_layer_freq", 2),
        ("deepseek_v3", "attention_bias", True),
        ("deepseek_v3", "topk_method", "greedy"),
        ("deepseek_v3", "n_shared_experts", 0),
        ("deepseek_v3", "index_topk", 2048),
        ("deepseek_v3", "first_k_dense_replace", 3),
        ("deepseek_v2", "norm_topk_prob", True),
        ("deepseek_v2", "topk_method", "noaux_tc"),
        ("deepseek_v2", "n_group", 2),
        ("mixtral", "sliding_window", 4096),
        ("mixtral", "head_dim", 16),
        ("mixtral", "rope_scaling", {"rope_type": "linear", "factor": 2.0}),
        ("olmoe", "norm_topk_prob", True),
        ("olmoe", "rms_norm_eps", 1e-6),
        ("olmoe", "clip_qkv", 8.0),
        ("olmoe", "num_key_value_heads", 2),
        ("glm4_moe", "first_k_dense_replace", 3),
        ("glm4_moe_lite", "first_k_dense_replace", 2),
        ("glm4_moe_lite", "mlp_layer_types", ["sparse", "dense", "sparse"]),
        ("glm4_moe", "rope_parameters", {"rope_type": "yarn", "factor": 2.0}),
        ("deepseek_v32", "q_lora_rank", None),
        ("deepseek_v32", "index_topk", None),
        ("deepseek_v32", "index_n_heads", 0),
        ("deepseek_v32", "index_head_dim", 2),
        ("deepseek_v32", "index_topk_freq", 4),
        ("deepseek_v32", "indexer_types", ["full", "shared", "full"]),
        ("deepseek_v32", "indexer_rope_interleave", True),
        ("deepseek_v32", "rope_interleave", False),
        ("deepseek_v32", "index_kpool", 4),
        ("deepseek_v32", "index_k_norm_type", "rms"),
        ("glm_moe_dsa", "indexer_rope_interleave", False),
        ("glm_moe_dsa", "indexer_types", ["shared", "full", "full"]),
        ("glm_moe_dsa", "indexer_types", ["full", "half", "full"]),
        ("glm_moe_dsa", "index_topk_pattern", "SFF"),
        ("minimax_m2", "scoring_func", "softmax"),
        ("minimax_m2", "use_routing_bias", False),
        ("minimax_m2", "use_qk_norm", False),
        ("minimax_m2", "qk_norm_type", "per_head"),
        ("minimax_m2", "attn_type_list", [0, 1]),
        ("minimax_m2", "shared_intermediate_size", 16),
        ("minimax_m2", "partial_rotary_factor", 0.25),
        ("minimax_m2", "rotary_dim", 0),
        ("gpt_oss", "hidden_act", "gelu"),
        ("gpt_oss", "tie_word_embeddings", True),
        ("gpt_oss", "sliding_window", None),
        ("gpt_oss", "head_dim", None),
        ("gpt_oss", "layer_types", ["sliding_attention", "full_attention"]),
        ("gpt_oss", "layer_types", ["chunked_attention"] * 3),
        ("gpt_oss", "swiglu_limit", 0),
        ("gpt_oss", "swiglu_alpha", "large"),
        ("gpt_oss", "hidden_act_alpha", 1.5),
        ("llama4", "num_experts_per_tok", 2),
        ("llama4", "attention_bias", True),
        ("llama4", "tie_word_embeddings", True),
        ("llama4", "interleave_moe_layer_step", 0),
        ("llama4", "interleave_moe_layer_step", 5),
        ("llama4", "moe_layers", [0, 1]),
        ("llama4", "no_rope_layers", [1, 0, 1, 0]),
        ("llama4", "no_rope_layer_interval", 2),
        ("llama4", "layer_types", ["full_attention"] * 4),
        ("llama4", "attention_chunk_size", None),
        ("llama4", "attention_chunk_size", 0),
        ("llama4", "floor_scale", 0),
        ("llama4", "attn_scale", "0.1"),
        ("llama4", "rope_parameters", {"rope_type": "yarn", "factor": 2.0}),
    ],
)
def test_what_sglang_and_the_twin_would_compute_differently_is_refused(
    config_of: ConfigOf, base: str, key: str, value: Any
) -> None:
    config = config_of(base) | {key: value}
    with pytest.raises(InvalidValueError, match=f"'{key}'"):
        family_for(config).twin_sources(config)


@pytest.mark.parametrize(("kind", "allowed"), [("yarn", True), ("default", True), ("llama3", False)])
def test_gpt_oss_has_yarn_or_the_default_rotary_embedding(config_of: ConfigOf, kind: str, allowed: bool) -> None:
    config = config_of("gpt_oss") | {"rope_scaling": {"rope_type": kind, "factor": 2.0}}
    told = pytest.raises(InvalidValueError, match="the rotary embedding is 'llama3'")
    with contextlib.nullcontext() if allowed else told:
        family_for(config).check(config)


def test_layers_of_gpt_oss_alternate_where_the_config_does_not_say(config_of: ConfigOf) -> None:
    config = config_of("gpt_oss")
    del config["layer_types"]
    family = family_for(config)
    assert [family.window(config, layer) for layer in range(3)] == [8, 0, 8]
    assert AutoConfig.for_model(**config).layer_types == family.layer_types(config)  # type: ignore[attr-defined]


def test_sglang_s_name_of_gpt_oss_s_alpha_is_given_where_the_config_has_hugging_face_s(config_of: ConfigOf) -> None:
    config = config_of("gpt_oss")
    assert family_for(config).missing_keys(config) == {}
    assert family_for(config).missing_keys(config | {"swiglu_alpha": 1.5}) == {"hidden_act_alpha": 1.5}


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe"])
def test_of_a_config_with_some_of_the_sizes_all_that_are_missing_are_named(config_of: ConfigOf, family: str) -> None:
    config = {key: value for key, value in config_of(family).items() if not key.startswith("linear_")}
    with pytest.raises(InvalidValueError, match=r"5 of the 15 sizes of a qwen3_\w+ are missing: .*linear_key"):
        family_for(config).check(config)
