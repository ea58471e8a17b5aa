"""Router arithmetic against float64 and SGLang's own choice of experts."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.layers.moe.topk import fused_topk_torch_native

from kt_runtime.ops.router import float32_logits, softmax_top_k


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_a_tokens_logits_are_float32_and_do_not_depend_on_the_other_tokens() -> None:
    hidden, weight = drawn(33, 64, seed=0).bfloat16(), drawn(8, 64, seed=1).bfloat16()
    logits = float32_logits(hidden, weight)
    torch.testing.assert_close(logits.double(), hidden.double() @ weight.double().T, rtol=0, atol=1e-5)
    assert torch.equal(float32_logits(hidden[:1], weight), logits[:1])


@pytest.mark.parametrize("normalise", [True, False])
def test_experts_and_weights_are_those_of_sglang(normalise: bool) -> None:
    hidden, logits = drawn(9, 16, seed=2), drawn(9, 8, seed=3)
    weights, ids = softmax_top_k(logits, 3, normalise)
    expected_weights, expected_ids = fused_topk_torch_native(hidden, logits, topk=3, renormalize=normalise)
    assert torch.equal(ids, expected_ids.to(ids.dtype))
    assert torch.equal(weights, expected_weights)
