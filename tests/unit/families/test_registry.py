from __future__ import annotations

from typing import Any

import pytest

from kt_runtime.errors import UnknownNameError
from kt_runtime.families import FAMILIES, family_for
from kt_runtime.families.traits import SIGMOID, traits_of


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}, "qwen3_moe"),
        ({"model_type": "qwen3_moe"}, "qwen3_moe"),
        ({"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"}, "deepseek_v2"),
        ({"architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2"}, "deepseek_v3"),
        ({"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}, "deepseek_v3"),
        ({"model_type": "kimi_k2"}, "deepseek_v3"),
    ],
)
def test_a_config_finds_its_family(config: dict[str, Any], name: str) -> None:
    assert family_for(config).name == name


@pytest.mark.parametrize(
    "config",
    [{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, {"model_type": "qwen3_mo"}, {}],
)
def test_an_unknown_family_is_refused_with_the_known_ones(config: dict[str, Any]) -> None:
    with pytest.raises(UnknownNameError, match=r"config.json: unknown model family .*[qQ]wen3") as caught:
        family_for(config)
    assert caught.value.known
    assert "did you mean" not in str(caught.value)  # "Qwen3MoeForCausalLM" is not what a Llama's config means


def test_families_do_not_claim_the_same_model() -> None:
    types = [name for family in FAMILIES for name in family.model_types]
    architectures = [name for family in FAMILIES for name in family.architectures]
    assert len(set(types)) == len(types)
    assert len(set(architectures)) == len(architectures)


UNKNOWN: dict[str, tuple[dict[str, Any], str]] = {
    "deepseek_v32": (
        {"n_routed_experts": 256, "kv_lora_rank": 512, "scoring_func": "sigmoid", "n_shared_experts": 1}
        | {"first_k_dense_replace": 3, "index_topk": 2048},
        "nearest is deepseek_v32 (DeepseekV32ForCausalLM): config.json shows no difference",
    ),
    "minimax_m3": (
        {"num_local_experts": 256, "scoring_func": "sigmoid", "use_routing_bias": True, "swiglu_limit": 7.0},
        "nearest is minimax_m2 (MiniMaxM2ForCausalLM): it has a clamp in the experts ('swiglu_limit')",
    ),
    "qwen4": (
        {"num_experts": 512, "shared_expert_intermediate_size": 512}
        | {"layer_types": ["linear_attention", "full_attention"]},
        "nearest is qwen3_next (Qwen3NextForCausalLM): config.json shows no difference",
    ),
    "kimi_linear": (
        {"num_experts": 256, "kv_lora_rank": 512, "scoring_func": "sigmoid", "num_shared_experts": 1}
        | {"first_k_dense_replace": 1, "layer_types": ["linear_attention", "full_attention"]},
        "nearest is deepseek_v3 (DeepseekV3ForCausalLM): it has linear attention ('layer_types')",
    ),
    "nemotron_h": (
        {"n_routed_experts": 128, "n_shared_experts": 1, "layer_types": ["mamba", "moe"]},
        "it has state-space layers ('layer_types')",
    ),
    "windowed": (
        {"num_local_experts": 32, "sliding_window": 128, "swiglu_limit": 7.0},
        "nearest is gpt_oss (GptOssForCausalLM): config.json shows no difference",
    ),
    "windowed, with shared experts": (
        {"num_local_experts": 32, "sliding_window": 128, "n_shared_experts": 1},
        "it has sliding windows ('sliding_window')",
    ),
    "qwen3_vl_moe": (
        {"vision_config": {"depth": 27}, "text_config": {"num_experts": 128}},
        "nearest is qwen3_moe (Qwen3MoeForCausalLM): it has inputs other than text ('vision_config')",
    ),
    "llama": ({"num_hidden_layers": 32}, "it has no routed experts"),
}


@pytest.mark.parametrize("model_type", UNKNOWN)
def test_of_an_unknown_family_the_nearest_is_named_with_what_differs(model_type: str) -> None:
    config, told = UNKNOWN[model_type]
    with pytest.raises(UnknownNameError) as caught:
        family_for({"architectures": ["Unknown"], "model_type": model_type} | config)
    assert told in str(caught.value)


def test_traits_of_a_family_are_those_of_its_configs(config: dict[str, Any]) -> None:
    read = traits_of(config)
    traits = family_for(config).traits
    assert read is not None and read.attention == traits.attention
    assert (read.shared_experts, read.dense_first_layers) == (traits.shared_experts, traits.dense_first_layers)
    assert read.parts == traits.parts
    stack = family_for(config).decoder_stack(config)
    if stack is None:
        assert (family_for(config).softmax_normalises(config) is None) == (traits.router == SIGMOID)
        return
    assert (stack.groups is not None and stack.groups.is_sigmoid) == (traits.router == SIGMOID)
