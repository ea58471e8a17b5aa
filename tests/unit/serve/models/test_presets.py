from __future__ import annotations

import pytest

from kt_runtime.errors import UnknownNameError
from kt_runtime.families import family_for
from kt_runtime.serve.models.checkpoint import checkpoint_tensors, count_parameters
from kt_runtime.serve.models.presets import is_preset, load_preset, preset_names

# Billions of parameters as the models' own pages give them, without multi-token prediction and vision towers.
PUBLISHED = {
    "DeepSeek-V3-bf16": (671, 37),
    "DeepSeek-V3": (671, 37),
    "DeepSeek-V3.2": (671, 37),
    "GLM-5": (744, 40),
    "GLM-5.2": (744, 40),
    "DeepSeek-V2-Lite": (15.7, 2.4),
    "Kimi-K2": (1026, 32),
    "Kimi-K2-Thinking": (1026, 32),
    "Kimi-K2.5": (1026, 32),
    "Mixtral-8x7B": (46.7, 12.9),
    "OLMoE-1B-7B": (6.92, 1.28),
    "MiniMax-M2": (229, 10),
    "gpt-oss-20b": (20.9, 3.6),
    "gpt-oss-120b": (116.8, 5.1),
    "Llama-4-Scout": (107.8, 17),
    "Llama-4-Maverick": (400.7, 17),
    "GLM-4.5": (353, 32),
    "GLM-4.5-Air": (106.9, 12),
    "Qwen3-30B-A3B": (30.5, 3.3),
    "Qwen3-235B-A22B": (235, 22),
    "Qwen3-Next-80B-A3B": (80, 3.9),  # the page rounds to 3, without embedding and head
    "Qwen3.5-35B-A3B": (34.7, 3.5),
    "Qwen3.5-122B-A10B": (122, 10.7),
    "Qwen3.5-397B-A17B": (396.3, 17.5),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_the_published_ones(name: str) -> None:
    config = load_preset(name).config
    counts = count_parameters(config)
    total, active = PUBLISHED[name]
    assert counts.total / 1e9 == pytest.approx(total, rel=0.005)
    # What counts as active differs from page to page: with or without the embedding, which is large in gpt-oss-20b.
    embedding = config["vocab_size"] * config["hidden_size"] if name.startswith("gpt-oss") else 0
    assert (counts.active - embedding) / 1e9 == pytest.approx(active, rel=0.12)


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_of_a_known_family_and_counts_agree_with_its_tensors(name: str) -> None:
    preset = load_preset(name)
    family_for(preset.config).check(preset.config)
    counts = count_parameters(preset.config)
    tensors = list(checkpoint_tensors(preset.config))
    assert counts.total == counts.dense + counts.routed == sum(tensor.num_parameters for tensor in tensors)
    assert counts.routed == sum(tensor.num_parameters for tensor in tensors if tensor.is_routed_expert)
    assert len({tensor.name for tensor in tensors}) == len(tensors)


def test_bench_preset_has_the_shape_that_figures_are_quoted_for() -> None:
    config = load_preset("bench-qwen3-moe").config
    keys = ("hidden_size", "num_hidden_layers", "num_experts", "moe_intermediate_size", "num_experts_per_tok")
    assert [config[key] for key in keys] == [1024, 12, 64, 512, 4]
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (16, 4)


def test_names_are_found_in_any_case() -> None:
    assert is_preset("kimi-k2")
    assert load_preset("KIMI-K2").name == "Kimi-K2"


def test_unknown_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown preset 'tiny-deepseek-v4'; did you mean 'tiny-deepseek-v3'\?"):
        load_preset("tiny-deepseek-v4")
