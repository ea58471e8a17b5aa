"""Whose experts the store keeps, and what is said when there is no store."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import DeepseekV3Config, LlamaConfig, Qwen3MoeConfig

from kt_runtime.errors import ConflictError, InvalidValueError, NotFoundError, UnknownNameError
from kt_runtime.families.stack import ExpertMlp
from kt_runtime.serve.models.presets import load_preset
from kt_runtime.sglang_patch.cpu import moe


def test_only_known_families_keep_their_experts_in_the_store() -> None:
    assert moe.keeps_experts_in_store(Qwen3MoeConfig(architectures=["Qwen3MoeForCausalLM"]))
    assert moe.keeps_experts_in_store(DeepseekV3Config(architectures=["DeepseekV3ForCausalLM"]))
    assert not moe.keeps_experts_in_store(LlamaConfig(architectures=["LlamaForCausalLM"]))


def test_without_a_model_there_is_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "_store", None)
    with pytest.raises(ConflictError, match="not open"):
        moe.expert_store()


def test_experts_are_read_from_a_local_directory_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(moe, "_store", None)
    with pytest.raises(NotFoundError, match="some/hub-name"):
        moe.open_store("some/hub-name")


def runner_config(**changes: Any) -> SimpleNamespace:
    """SGLang's `MoeRunnerConfig`, as far as it is read."""
    values = {
        "activation": "silu",
        "gemm1_alpha": None,
        "gemm1_clamp_limit": None,
        "swiglu_limit": None,
        "apply_router_weight_on_input": False,
        "is_gated": True,
        "no_combine": False,
    }
    return SimpleNamespace(**values | changes)


GPT_OSS_RUNNER = {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 2.0}


@pytest.mark.parametrize(
    ("changes", "has_bias", "expected"),
    [
        ({}, False, ExpertMlp()),
        (GPT_OSS_RUNNER, True, ExpertMlp("swigluoai", 2.0, 1.702, has_bias=True)),
        ({"swiglu_limit": 10.0}, False, ExpertMlp("silu_clamped", 10.0)),
        ({"activation": "gelu"}, False, ExpertMlp("gelu")),
        ({"activation": "relu2", "is_gated": False}, False, ExpertMlp("relu2")),
    ],
)
def test_what_sglang_says_of_experts_is_what_the_store_computes(
    changes: dict[str, Any], has_bias: bool, expected: ExpertMlp
) -> None:
    assert moe.described_mlp(runner_config(**changes), has_bias) == expected


def layer(num_experts: int = 8, with_bias: bool = True, **changes: Any) -> SimpleNamespace:
    return SimpleNamespace(
        layer_name="model.layers.0.mlp.experts",
        moe_runner_config=runner_config(**GPT_OSS_RUNNER | changes),
        with_bias=with_bias,
        num_experts=num_experts,
        num_fused_shared_experts=0,
        moe_ep_size=1,
        moe_tp_size=1,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"with_bias": False}, "has_bias is False in SGLang; the expert store's experts have True"),
        ({"gemm1_clamp_limit": 7.0}, r"limit is 7.0 in SGLang; the expert store's experts have 2.0"),
        ({"gemm1_alpha": None}, "activation is 'silu' in SGLang; the expert store's experts have 'swigluoai'"),
        ({"apply_router_weight_on_input": True}, "apply_router_weight_on_input is True; the expert store has False"),
        ({"is_gated": False}, "is_gated is False; the expert store has True"),
    ],
)
def test_experts_that_sglang_would_compute_otherwise_are_refused(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    config = load_preset("tiny-gpt-oss").config
    described = SimpleNamespace(hf_config=SimpleNamespace(to_dict=lambda: config))
    monkeypatch.setattr(moe, "model_config", lambda: described)
    moe._check_layer(layer(), 8)
    with pytest.raises(InvalidValueError, match=message):
        moe._check_layer(layer(**changes), 8)


def test_an_activation_that_the_store_has_not_is_refused_by_name() -> None:
    with pytest.raises(UnknownNameError, match="'mish'"):
        moe.described_mlp(runner_config(activation="mish"), False)
