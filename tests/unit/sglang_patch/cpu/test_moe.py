"""What SGLang's layers must compute for the store to compute it in their place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kt_runtime.errors import InvalidValueError, UnknownNameError
from kt_runtime.families.stack import ExpertMlp
from kt_runtime.serve.models.presets import load_preset
from kt_runtime.sglang_patch.cpu import moe


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
