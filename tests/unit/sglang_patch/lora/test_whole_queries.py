"""LoRA's targets of latent attention without compressed queries, in SGLang's terms."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kt_runtime.sglang_patch.lora.whole_queries import hidden_dim, name_targets

TARGETS = {"qkv_proj", "fused_qkv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
SIZES = {"hidden_size": 32, "num_attention_heads": 4, "qk_nope_head_dim": 6, "qk_rope_head_dim": 2, "kv_lora_rank": 8}


def config(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**SIZES, "q_lora_rank": None, **changes})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}),
        ({"q_lora_rank": 10}, TARGETS),
        ({"kv_lora_rank": None}, TARGETS),  # no latent attention
    ],
)
def test_targets_are_named_as_the_model_names_its_linears(changes: dict[str, Any], expected: set[str]) -> None:
    manager = SimpleNamespace(base_hf_config=config(**changes), target_modules=set(TARGETS))
    name_targets(None, manager)
    assert manager.target_modules == expected


def test_sizes_are_those_of_the_linears_and_others_are_sglang_s() -> None:
    def sglang_s(name: str, *_: Any) -> tuple[str, int]:
        return name, 0

    assert hidden_dim(sglang_s, "q_proj", config(), 0, 0) == (32, 4 * 8)
    assert hidden_dim(sglang_s, "kv_a_proj_with_mqa", config(), 0, 0) == (32, 10)
    assert hidden_dim(sglang_s, "o_proj", config(), 0, 0) == ("o_proj", 0)
    assert hidden_dim(sglang_s, "q_proj", config(q_lora_rank=10), 0, 0) == ("q_proj", 0)
