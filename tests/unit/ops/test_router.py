"""Router arithmetic against float64 and SGLang's own choice of experts."""

from __future__ import annotations

import pytest
import torch
from reference.drawn import drawn
from sglang.srt.layers.moe.topk import fused_topk_torch_native

from kt_runtime.ops.router import float32_logits, softmax_top_k


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
    torch.testing.assert_close(weights, expected_weights, rtol=1e-6, atol=0)  # 1.8e-7 measured


def given_ids() -> torch.Tensor:
    """Other experts than the router's, in no order of their weights."""
    return torch.stack([torch.randperm(16, generator=torch.Generator().manual_seed(row))[:3] for row in range(9)]).int()


@pytest.mark.parametrize("is_given", [False, True], ids=["chosen", "given"])
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_the_weights_is_autograds(normalise: bool, dtype: torch.dtype, is_given: bool) -> None:
    logits = drawn(9, 16, seed=4).to(dtype).requires_grad_()
    by_weights = drawn(9, 3, seed=5)
    weights, ids = softmax_top_k(logits, 3, normalise, given_ids() if is_given else None)
    assert torch.equal(ids, given_ids()) == is_given
    weights.backward(by_weights)
    exact = logits.detach().double().requires_grad_()
    chosen = exact.softmax(-1).gather(1, ids.long())
    (chosen / chosen.sum(-1, keepdim=True) if normalise else chosen).backward(by_weights.double())
    torch.testing.assert_close(
        weights.detach().double(),
        (chosen / chosen.sum(-1, keepdim=True) if normalise else chosen).detach(),
        rtol=1.6e-6,  # 1.6e-7 measured
        atol=0,
    )
    assert logits.grad is not None and exact.grad is not None and logits.grad.dtype == dtype
    rtol = 2.0**-8 if dtype == torch.bfloat16 else 5e-6  # one rounding; 8.2e-7 measured, and 9.3e-8 near zero
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=rtol, atol=5e-7)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_experts_that_are_given_as_the_router_chooses_them_have_its_bits(normalise: bool, dtype: torch.dtype) -> None:
    logits = (4 * drawn(70, 60, seed=6)).to(dtype)
    weights, ids = softmax_top_k(logits, 8, normalise)
    again, same = softmax_top_k(logits, 8, normalise, ids)
    assert torch.equal(again, weights) and torch.equal(same, ids)
