from __future__ import annotations

from typing import Any

import pytest

from kt_runtime.errors import UnknownNameError
from kt_runtime.families import FAMILIES, family_for


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
