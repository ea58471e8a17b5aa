from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kt_runtime.errors import InvalidValueError, UnknownNameError
from kt_runtime.families import GROUPS, family_for, resolve_targets

ConfigOf = Callable[[str], dict[str, Any]]


def names(config: dict[str, Any], *targets: str) -> set[str]:
    return {module.name for module in resolve_targets(config, targets)}


def test_all_means_every_adaptable_module_in_model_order(config: dict[str, Any]) -> None:
    assert resolve_targets(config, ["all"]) == family_for(config).lora_modules(config)


def test_groups_are_disjoint_and_complete(config_of: ConfigOf) -> None:
    config = config_of("deepseek_v3")
    parts = [names(config, group) for group in GROUPS]
    assert set().union(*parts) == names(config, "all")
    assert sum(map(len, parts)) == len(names(config, "all"))


def test_gate_proj_means_dense_shared_and_routed_experts(config_of: ConfigOf) -> None:
    assert names(config_of("deepseek_v3"), "gate_proj") == {
        "model.layers.0.mlp.gate_proj",
        "model.layers.1.mlp.shared_experts.gate_proj",
        "model.layers.1.mlp.experts.gate_proj",
        "model.layers.2.mlp.shared_experts.gate_proj",
        "model.layers.2.mlp.experts.gate_proj",
    }


def test_repeated_and_overlapping_targets_count_once(config_of: ConfigOf) -> None:
    config = config_of("qwen3_moe")
    assert resolve_targets(config, ["q_proj", "attention", "q_proj"]) == resolve_targets(config, ["attention"])


def test_an_unknown_target_is_refused_with_the_nearest_name(config_of: ConfigOf) -> None:
    with pytest.raises(UnknownNameError, match=r"LoRA target 'q_porj'; did you mean 'q_proj'\? known: .*experts"):
        resolve_targets(config_of("qwen3_moe"), ["q_porj"])


@pytest.mark.parametrize(
    ("base", "target"),
    [
        ("qwen3_moe", "shared"),
        ("qwen3_moe", "mlp"),
        ("qwen3_moe", "kv_b_proj"),
        ("deepseek_v3", "k_proj"),
        ("deepseek_v2 without q_lora_rank", "q_b_proj"),
    ],
)
def test_a_target_that_matches_nothing_is_refused_with_what_the_model_has(
    config_of: ConfigOf, base: str, target: str
) -> None:
    with pytest.raises(InvalidValueError, match=f"'{target}' matches nothing.*it has: all, attention"):
        resolve_targets(config_of(base), ["o_proj", target])


@pytest.mark.parametrize("target", ["gate", "lm_head", "embed_tokens"])
def test_router_embeddings_and_head_are_refused_by_name(config_of: ConfigOf, target: str) -> None:
    with pytest.raises(InvalidValueError, match=f"'{target}'.*never adapted"):
        resolve_targets(config_of("qwen3_moe"), [target])


def test_no_targets_are_refused(config_of: ConfigOf) -> None:
    with pytest.raises(InvalidValueError, match="no LoRA targets"):
        resolve_targets(config_of("qwen3_moe"), [])
