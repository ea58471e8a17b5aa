from __future__ import annotations

import pytest
import torch

from kt_runtime.resident.training.losses import (
    LossTokens,
    WeightedCrossEntropy,
    hidden_gradient,
    log_softmax,
    tokens_per_chunk,
)


@pytest.fixture
def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden, head, targets, weights, of which some are 0."""
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(12, 8, generator=generator), torch.randn(30, 8, generator=generator)
    weights = torch.rand(12, generator=generator)
    weights[::3] = 0
    return hidden, head, torch.randint(0, 30, (12,), generator=generator), weights


def cross_entropy(logprobs: torch.Tensor, weights: torch.Tensor) -> float:
    nothing = torch.zeros(0)
    return WeightedCrossEntropy().value(LossTokens(logprobs, weights, nothing, nothing, nothing)).loss


def test_cross_entropy_and_its_gradient_equal_autograd(tensors: tuple[torch.Tensor, ...]) -> None:
    hidden, head, targets, weights = tensors
    leaf = hidden.clone().requires_grad_()
    expected = (torch.nn.functional.cross_entropy(leaf @ head.T, targets, reduction="none") * weights).sum()
    expected.backward()
    _, everything = log_softmax(hidden, head)
    logprobs = everything.gather(1, targets[:, None])[:, 0]
    slopes = WeightedCrossEntropy().slopes_ahead(weights)
    assert slopes is not None
    assert cross_entropy(logprobs, weights) == pytest.approx(float(expected.detach()), rel=2e-7)  # 2.8e-8 measured
    gradient = hidden_gradient(everything, targets, slopes, head)
    assert leaf.grad is not None and torch.allclose(gradient, leaf.grad, rtol=0, atol=1e-6)  # 1.8e-7 measured
    assert not gradient[::3].any()


def test_the_gradient_stays_exact_where_a_token_is_certain(tensors: tuple[torch.Tensor, ...]) -> None:
    """1 - p is computed as exp(logp) - 1 with p = 1: exactly 0."""
    hidden, head, targets, _ = tensors
    head = head.clone()
    head[targets[1]] = 1000 * hidden[1]
    _, everything = log_softmax(hidden[1:2], head)
    assert everything[0, targets[1]] == 0
    gradient = hidden_gradient(everything, targets[1:2], torch.tensor([-1.0]), head)
    assert torch.equal(gradient, torch.zeros_like(gradient))


def test_a_weight_of_zero_takes_a_token_out_even_where_its_logprob_is_infinite() -> None:
    assert cross_entropy(torch.tensor([float("-inf"), -2.0]), torch.tensor([0.0, 0.5])) == 1.0


def test_a_chunk_has_one_token_at_least() -> None:
    assert tokens_per_chunk(10**9) == 1
    assert tokens_per_chunk(1 << 14) == 1 << 10
