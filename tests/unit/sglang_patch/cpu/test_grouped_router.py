"""SGLang's DeepSeek routers, patched, against SGLang's own uncompiled ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

TOKENS, EXPERTS = 29, 16
ROUTING: dict[str, Any] = {"topk": 4, "renormalize": True, "num_expert_group": 4, "topk_group": 2}
ROUTING |= {"routed_scaling_factor": 2.5, "apply_routed_scaling_factor_on_output": True}


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


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
