"""Advantages and weights against the papers' formulas, written out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kt_runtime.train.recipe import Recipe
from kt_runtime.train.rollouts.advantages import group_advantages, kl_advantages, token_weight

REWARDS = [1.0, 0.0, 0.25, -2.0]


def test_grpo_is_the_distance_from_the_mean_in_deviations() -> None:
    mean = sum(REWARDS) / 4
    deviation = math.sqrt(sum((reward - mean) ** 2 for reward in REWARDS) / 3)
    expected = [(reward - mean) / (deviation + 1e-4) for reward in REWARDS]
    assert group_advantages(REWARDS, "grpo") == pytest.approx(expected, abs=1e-15)


def test_rloo_compares_with_the_mean_of_the_others() -> None:
    expected = [
        reward - sum(other for place, other in enumerate(REWARDS) if place != mine) / 3
        for mine, reward in enumerate(REWARDS)
    ]
    assert group_advantages(REWARDS, "rloo") == pytest.approx(expected, abs=1e-15)


def test_dr_grpo_does_not_divide() -> None:
    assert group_advantages(REWARDS, "dr_grpo") == pytest.approx([r - sum(REWARDS) / 4 for r in REWARDS], abs=1e-15)


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "dr_grpo"])
@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3])
def test_a_group_of_equal_rewards_has_no_advantage_at_all(estimator: str, reward: float) -> None:
    assert group_advantages([reward] * 7, estimator).tolist() == [0.0] * 7


@pytest.mark.parametrize(
    ("keys", "weight"),
    [
        ({}, 1 / (32 * 5)),
        ({"advantage_estimator": "rloo"}, 1 / 32),
        ({"advantage_estimator": "dr_grpo"}, 1 / (32 * 100)),
        ({"advantage_estimator": "rloo", "policy_loss": "gspo"}, 1 / (32 * 5)),
    ],
)
def test_a_tokens_weight(make_recipe: Callable[..., Recipe], keys: dict[str, Any], weight: float) -> None:
    recipe = make_recipe(stage="grpo", max_new_tokens=100, **keys)
    assert token_weight(recipe, num_answers=32, num_tokens=5) == weight


def test_the_divergence_moves_advantages_between_tokens_and_adds_nothing_up() -> None:
    sampled = [np.array([-1.0, -2.0]), np.array([-0.5])]
    reference = [np.array([-1.5, -1.0]), np.array([-0.5])]
    mean = (0.5 - 1.0 + 0.0) / 3
    added = kl_advantages(sampled, reference, 0.1)
    expected = [[0.1 * (mean - 0.5), 0.1 * (mean + 1.0)], [0.1 * mean]]
    for row, wanted in zip(added, expected, strict=True):
        assert row == pytest.approx(wanted, abs=1e-15)
    assert abs(float(np.concatenate(added).sum())) < 1e-15
