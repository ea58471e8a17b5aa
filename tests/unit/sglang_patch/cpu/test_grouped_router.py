"""SGLang's DeepSeek routers, patched, against SGLang's own uncompiled ones and against the twin's routers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from reference.drawn import drawn
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from kt_runtime.resident.twin.routed import GroupedRouter
from kt_runtime.sglang_patch.cpu.router import router_logits

TOKENS, EXPERTS = 29, 16
ROUTING: dict[str, Any] = {"topk": 4, "renormalize": True, "num_expert_group": 4, "topk_group": 2}
ROUTING |= {"routed_scaling_factor": 2.5, "apply_routed_scaling_factor_on_output": True}


def uncompiled(function: Any) -> Any:
    return getattr(function, "_torchdynamo_orig_callable", function)


TOLERANCE = 1e-6  # measured: 1.8e-7 of up to 1.8


def by_expert(weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.zeros(len(weights), EXPERTS).scatter(1, ids.long(), weights)


def test_the_biased_router_is_sglang_s_for_any_batch(patched_sglang: None) -> None:
    from sglang.srt.layers.moe import topk

    hidden, logits, bias = drawn(TOKENS, 8, seed=0), drawn(TOKENS, EXPERTS, seed=1), drawn(EXPERTS, seed=2) / 10
    weights, ids = topk.biased_grouped_topk(hidden, logits, bias, **ROUTING)
    assert weights.dtype == torch.float32 and ids.dtype == torch.int32
    expected = uncompiled(topk.biased_grouped_topk_impl)(hidden, logits, bias, **ROUTING)
    torch.testing.assert_close(by_expert(weights, ids), by_expert(*expected), rtol=0, atol=TOLERANCE)
    alone = topk.biased_grouped_topk(hidden[7:8], logits[7:8], bias, **ROUTING)
    assert torch.equal(alone[0][0], weights[7]) and torch.equal(alone[1][0], ids[7])


@pytest.mark.parametrize("scoring_func", ["softmax", "sigmoid"])
def test_the_router_without_a_bias_is_sglang_s(patched_sglang: None, scoring_func: str) -> None:
    from sglang.srt.layers.moe import topk

    hidden, logits = drawn(TOKENS, 8, seed=3), drawn(TOKENS, EXPERTS, seed=4)
    weights, ids = topk.grouped_topk(hidden, logits, **ROUTING, scoring_func=scoring_func)
    expected = uncompiled(topk.grouped_topk_gpu)(hidden, logits, **ROUTING, scoring_func=scoring_func)
    torch.testing.assert_close(by_expert(weights, ids), by_expert(*expected), rtol=0, atol=TOLERANCE)


HIDDEN = 64
SIZES: dict[str, Any] = {"hidden_size": HIDDEN, "n_routed_experts": EXPERTS, "num_experts_per_tok": 4}
SIZES |= {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "num_attention_heads": 4}


def sigmoid_router() -> torch.nn.Module:
    router = DeepseekV3TopkRouter(DeepseekV3Config(**SIZES, norm_topk_prob=True))
    router.get_buffer("e_score_correction_bias").copy_(drawn(EXPERTS, seed=5) / 10)
    return router


def softmax_router() -> torch.nn.Module:
    return DeepseekV2TopkRouter(DeepseekV2Config(**SIZES, topk_method="group_limited_greedy"))


@pytest.mark.parametrize("make", [sigmoid_router, softmax_router])
@torch.no_grad()
def test_serving_and_training_choose_the_same_experts_with_the_same_bits(patched_sglang: None, make: Any) -> None:
    from sglang.srt.layers.moe.topk import TopKConfig, select_experts

    twin = make()
    twin.__class__ = GroupedRouter
    twin.weight = torch.nn.Parameter(drawn(EXPERTS, HIDDEN, seed=6).bfloat16() / 4, requires_grad=False)
    hidden, bias = drawn(200, HIDDEN, seed=7).bfloat16(), getattr(twin, "e_score_correction_bias", None)
    config = TopKConfig(
        top_k=4,
        use_grouped_topk=True,
        topk_group=2,
        num_expert_group=4,
        renormalize=bias is not None,
        correction_bias=bias,
        routed_scaling_factor=2.5,
        apply_routed_scaling_factor_on_output=True,
        scoring_func="softmax" if bias is None else "sigmoid",
    )
    served = select_experts(hidden, router_logits(SimpleNamespace(weight=twin.weight), hidden), config)
    _, weights, ids = twin(hidden)
    assert torch.equal(served.topk_weights, weights) and torch.equal(served.topk_ids, ids)
