"""Policy losses against each paper's formula written token by token, and their slopes against differences."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from kt_runtime.errors import InvalidValueError
from kt_runtime.resident.training.losses import LossTokens, LossValue
from kt_runtime.resident.training.policy import PolicyLossFunction, check_samples
from kt_runtime.wire import PolicyLoss, Samples

# Three sequences, shuffled and a part of a longer call, as a microbatch is. The prompts' weights are 0.
LENGTHS = [6, 5, 7]
SEQUENCE = torch.repeat_interleave(torch.tensor([4, 1, 2]), torch.tensor(LENGTHS))
WEIGHTS = torch.cat([torch.tensor([0.0, 0.0] + [1.0, 0.5] * 3)[:length] for length in LENGTHS])
COUNTED = WEIGHTS != 0
NUM_CALL_TOKENS = 40
SETTINGS: list[dict[str, Any]] = [
    {"kind": "importance_sampling"},
    {"kind": "ppo"},
    {"kind": "ppo", "clip_low": 0.5, "clip_high": 1.05},
    {"kind": "cispo"},
    {"kind": "cispo", "clip_low": 0.9, "clip_high": 1.1},
    {"kind": "dro", "beta": 0.05},
    {"kind": "gspo"},
    {"kind": "gspo", "clip_low": 0.9, "clip_high": 1.2},
]
settings_and_names = pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(map(str, s.values())))


class Case:
    def __init__(self, spread: float = 0.3) -> None:
        generator = np.random.default_rng(5)
        self.where = torch.from_numpy(generator.permutation(NUM_CALL_TOKENS)[: len(SEQUENCE)])
        self.samples = Samples(
            -generator.uniform(0.05, 3, NUM_CALL_TOKENS).astype(np.float32),
            generator.normal(0, 1, NUM_CALL_TOKENS).astype(np.float32),
        )
        moved = generator.normal(0, spread, len(SEQUENCE))
        self.logprobs = torch.from_numpy(self.samples.logprobs[self.where.numpy()] + moved).double()

    def value(self, settings: dict[str, Any], logprobs: torch.Tensor | None = None) -> LossValue:
        function = PolicyLossFunction(PolicyLoss(**settings), self.samples)
        given = self.logprobs if logprobs is None else logprobs
        return function.value(LossTokens(given, WEIGHTS, self.where, SEQUENCE, torch.zeros(len(SEQUENCE))))


def by_the_papers(case: Case, kind: str, clip_low: float, clip_high: float, beta: float) -> tuple[float, int]:
    """(the loss, the clipped tokens) with Python's own numbers."""
    total, clipped = 0.0, 0
    sampled = case.samples.logprobs[case.where.numpy()].astype(float).tolist()
    advantages = case.samples.advantages[case.where.numpy()].astype(float).tolist()
    present, weights = case.logprobs.tolist(), WEIGHTS.tolist()
    for sequence in (1, 2, 4):
        rows = [i for i in range(len(present)) if SEQUENCE[i] == sequence and weights[i]]
        mean = sum(present[i] - sampled[i] for i in rows) / len(rows)
        for i in rows:
            ratio = math.exp(mean if kind == "gspo" else present[i] - sampled[i])
            bounded = min(max(ratio, clip_low), clip_high)
            if kind == "importance_sampling":
                loss = -ratio * advantages[i]
            elif kind in ("ppo", "gspo"):
                loss = -min(ratio * advantages[i], bounded * advantages[i])
                clipped += bounded * advantages[i] < ratio * advantages[i]
            elif kind == "cispo":
                loss = -bounded * advantages[i] * present[i]
                clipped += bounded != ratio
            else:
                loss = -(advantages[i] * present[i] - beta / 2 * (present[i] - sampled[i]) ** 2)
            total += weights[i] * loss
    return total, clipped


@settings_and_names
def test_the_loss_is_the_papers(settings: dict[str, Any]) -> None:
    case = Case()
    defaults = {"ppo": (0.8, 1.2), "cispo": (0.0, 4.0), "gspo": (0.9997, 1.0004)}.get(settings["kind"], (0.0, 0.0))
    low, high = settings.get("clip_low", defaults[0]), settings.get("clip_high", defaults[1])
    expected, clipped = by_the_papers(case, settings["kind"], low, high, settings.get("beta", 0.0))
    found = case.value(settings)
    assert found.loss == pytest.approx(expected, rel=4e-15, abs=0)  # 4.8e-16 measured
    assert found.metrics["clipped"] == clipped
    if settings["kind"] in ("ppo", "gspo"):
        assert 0 < clipped < COUNTED.sum()


@settings_and_names
def test_slopes_are_the_loss_s_differences(settings: dict[str, Any]) -> None:
    """cispo's clipped ratio has no gradient, so that its factor is held fixed."""
    case, step = Case(), 1e-6
    slopes = case.value(settings).slopes
    assert not slopes[~COUNTED].any()
    for i in range(len(slopes)):
        moved = [case.logprobs.index_add(0, torch.tensor([i]), torch.tensor([d]).double()) for d in (step, -step)]
        if settings["kind"] == "cispo":
            factor = float(slopes[i])
            expected = (factor * float(moved[0][i]) - factor * float(moved[1][i])) / (2 * step)
            ratio = math.exp(float(case.logprobs[i]) - float(case.samples.logprobs[case.where[i]]))
            bounded = min(max(ratio, settings.get("clip_low", 0.0)), settings.get("clip_high", 4.0))
            advantage = float(case.samples.advantages[case.where[i]])
            assert factor == pytest.approx(-float(WEIGHTS[i]) * bounded * advantage, rel=2e-7, abs=0)  # 4.8e-8
        else:
            up, down = (case.value(settings, value).loss for value in moved)
            expected = (up - down) / (2 * step)
        assert float(slopes[i]) == pytest.approx(expected, rel=2e-7, abs=2e-9)  # 4.7e-8 measured


@settings_and_names
def test_on_policy_the_gradient_is_reinforce_s_and_the_divergence_is_exactly_zero(settings: dict[str, Any]) -> None:
    case = Case(spread=0.0)
    case.logprobs = torch.from_numpy(case.samples.logprobs[case.where.numpy()])
    found = case.value(settings)
    assert found.metrics == {"kl/k1": 0.0, "kl/k3": 0.0, "clipped": 0.0, "tokens": float(COUNTED.sum())}
    advantages = torch.from_numpy(case.samples.advantages)[case.where]
    expected = -WEIGHTS * advantages
    if settings["kind"] == "gspo":  # a sequence's tokens share its gradient
        for sequence in (1, 2, 4):
            rows = COUNTED & (sequence == SEQUENCE)
            expected[rows] = expected[rows].mean()
    torch.testing.assert_close(found.slopes, expected, rtol=1e-6, atol=0)  # 1.2e-7 measured


def test_divergences_are_sums_over_counted_tokens() -> None:
    case = Case()
    differences = (case.logprobs - torch.from_numpy(case.samples.logprobs).double()[case.where])[COUNTED]
    metrics = case.value({"kind": "ppo"}).metrics
    assert metrics["kl/k1"] == -float(differences.sum())
    k3 = float((differences.exp() - 1 - differences).sum())
    assert metrics["kl/k3"] == pytest.approx(k3, rel=1e-14, abs=0)  # 1.2e-15 measured


@settings_and_names
def test_a_masked_token_changes_nothing_whatever_it_holds(settings: dict[str, Any]) -> None:
    case = Case()
    before = case.value(settings)
    case.logprobs[~COUNTED] = float("nan")
    case.samples.logprobs[case.where[~COUNTED].numpy()] = 3e38
    after = case.value(settings)
    assert (after.loss, after.metrics) == (before.loss, before.metrics)
    assert torch.equal(after.slopes, before.slopes)


def test_nothing_counted_is_a_loss_of_zero() -> None:
    for settings in SETTINGS:
        tokens = LossTokens(torch.full((2,), -1.0), torch.zeros(2), torch.arange(2), torch.zeros(2), torch.zeros(2))
        found = PolicyLossFunction(PolicyLoss(**settings), Case().samples).value(tokens)
        assert found.loss == 0 and not found.slopes.any()


@settings_and_names
def test_microbatches_add_up_to_the_call(settings: dict[str, Any]) -> None:
    case = Case()
    function, whole = PolicyLossFunction(PolicyLoss(**settings), case.samples), case.value(settings)
    parts = []
    for part in (SEQUENCE == 4, SEQUENCE != 4):
        tokens = LossTokens(
            case.logprobs[part], WEIGHTS[part], case.where[part], SEQUENCE[part], torch.zeros(int(part.sum()))
        )
        parts.append(function.value(tokens))
        assert torch.equal(whole.slopes[part], parts[-1].slopes)
    assert sum(part.loss for part in parts) == pytest.approx(whole.loss, rel=3e-15, abs=0)  # 3.5e-16 measured
    for name, total in whole.metrics.items():
        assert sum(part.metrics[name] for part in parts) == pytest.approx(total, rel=1e-15, abs=0)  # 1.3e-16 measured


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"kind": "dro"}, "'dro': needs beta"),
        ({"kind": "ppo", "beta": 0.1}, r"beta is 0\.1; only 'dro' knows it"),
        ({"kind": "importance_sampling", "clip_high": 2.0}, r"clip_high is 2\.0; only ppo, cispo, gspo clip"),
        ({"kind": "dro", "beta": 0.1, "clip_low": 0.5}, r"clip_low is 0\.5"),
    ],
)
def test_a_setting_of_another_kind_is_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidValueError, match=reason):
        PolicyLoss(**settings)


def test_impossible_samples_are_refused() -> None:
    good, ones = np.array([-1.0, 0.0], np.float32), np.ones(2, np.float32)
    check_samples(Samples(good, ones), ones)
    check_samples(Samples(np.array([5.0, -1.0], np.float32), ones), np.array([0, 1], np.float32))
    with pytest.raises(InvalidValueError, match=r"sampled\[1\] is 0\.5; a log-probability is between -10000 and 0"):
        check_samples(Samples(np.array([-1.0, 0.5], np.float32), ones), ones)
    with pytest.raises(InvalidValueError, match=r"weights\[0\] is -1\.0"):
        check_samples(Samples(good, ones), np.array([-1, 1], np.float32))
    with pytest.raises(InvalidValueError, match=r"advantages\[0\] is nan"):
        Samples(good, np.array([np.nan, 1], np.float32))
    with pytest.raises(InvalidValueError, match=r"advantages have shape \[3\]"):
        Samples.from_sequences([[-1.0], [-2.0]], [[1.0], [1.0, 2.0]])
