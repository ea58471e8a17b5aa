from __future__ import annotations

import pytest
import torch

from kt_runtime.resident.losses import (
    SLOPES,
    cross_entropy_slope,
    hidden_gradient,
    target_logprobs,
    tokens_per_chunk,
    weighted_loss,
)


@pytest.fixture
def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden, head, targets, weights."""
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(12, 8, generator=generator), torch.randn(30, 8, generator=generator)
    return hidden, head, torch.randint(0, 30, (12,), generator=generator), torch.rand(12, generator=generator)


def test_cross_entropy_and_its_gradient_equal_autograd(tensors: tuple[torch.Tensor, ...]) -> None:
    hidden, head, targets, weights = tensors
    leaf = hidden.clone().requires_grad_()
    expected = (torch.nn.functional.cross_entropy(leaf @ head.T, targets, reduction="none") * weights).sum()
    expected.backward()
    logprobs, everything = target_logprobs(hidden, head, targets)
    gradient = hidden_gradient(everything, targets, cross_entropy_slope(logprobs, weights), head)
    assert weighted_loss(logprobs, weights) == pytest.approx(float(expected.detach()), rel=1e-6)
    assert torch.allclose(gradient, leaf.grad, atol=1e-6)


def test_the_gradient_stays_exact_where_a_token_is_certain(tensors: tuple[torch.Tensor, ...]) -> None:
    """1 - p is computed as exp(logp) - 1 with p = 1: exactly 0."""
    hidden, head, targets, weights = tensors
    head = head.clone()
    head[targets[0]] = 1000 * hidden[0]
    logprobs, everything = target_logprobs(hidden[:1], head, targets[:1])
    gradient = hidden_gradient(everything, targets[:1], cross_entropy_slope(logprobs, weights[:1]), head)
    assert logprobs[0] == 0
    assert torch.equal(gradient, torch.zeros_like(gradient))


def test_a_weight_of_zero_takes_a_token_out_even_where_its_logprob_is_infinite() -> None:
    assert weighted_loss(torch.tensor([float("-inf"), -2.0]), torch.tensor([0.0, 0.5])) == 1.0


def test_a_chunk_has_one_token_at_least() -> None:
    assert tokens_per_chunk(10**9) == 1
    assert tokens_per_chunk(1 << 14) == 1 << 10


def test_the_known_losses_are_those_of_the_protocol() -> None:
    assert set(SLOPES) == {"cross_entropy"}
