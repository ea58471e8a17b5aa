"""Losses against TRL where it is right, against numbers worked out by hand, and their slopes against differences."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from reference.trl_dpo import dpo_loss

from kt_runtime.errors import InvalidValueError
from kt_runtime.resident.training.losses import LossTokens, LossValue
from kt_runtime.resident.training.preference import Answers, PreferenceLossFunction, _metrics, check_pairs
from kt_runtime.wire.messages import PreferenceLoss

# Four sequences, that is two pairs; the prompt's tokens don't count.
LENGTHS = [5, 4, 3, 6]
PROMPTS = [2, 2, 1, 1]
COUNTED = [length - prompt for length, prompt in zip(LENGTHS, PROMPTS, strict=True)]
SEQUENCE = torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS))
WEIGHTS = torch.cat([torch.tensor([0.0] * p + [1.0] * (n - p)) for n, p in zip(LENGTHS, PROMPTS, strict=True)])
MEAN_LOGITS = torch.linspace(-1, 1, len(SEQUENCE))
REFERENCE = np.array([-5.5, -3.25, -4.0, -9.0], np.float32)
SETTINGS = [
    {"kind": "sigmoid", "beta": 0.1},
    {"kind": "sigmoid", "beta": 0.5, "label_smoothing": 0.2},
    {"kind": "hinge", "beta": 0.3},
    {"kind": "ipo", "beta": 0.1},
    {"kind": "orpo", "beta": 0.2},
    {"kind": "simpo", "beta": 2.0, "gamma": 0.5},
    {"kind": "sigmoid", "beta": 0.1, "ftx": 0.7, "scale": 0.25},
    {"kind": "orpo", "beta": 0.2, "ftx": 0.7, "scale": 3.0},
]


@pytest.fixture
def logprobs() -> torch.Tensor:
    return -torch.rand(len(SEQUENCE), generator=torch.Generator().manual_seed(1)) * 3 - 0.05


def loss_tokens(
    logprobs: torch.Tensor, weights: torch.Tensor, sequence: torch.Tensor, mean_logits: torch.Tensor
) -> LossTokens:
    return LossTokens(logprobs, weights, torch.arange(len(logprobs)), sequence, mean_logits)


def evaluate(logprobs: torch.Tensor, **settings: Any) -> LossValue:
    loss = PreferenceLoss(**settings)
    function = PreferenceLossFunction(loss, REFERENCE if loss.has_reference else None)
    return function.value(loss_tokens(logprobs, WEIGHTS, SEQUENCE, MEAN_LOGITS))


def answer_sums(logprobs: torch.Tensor) -> list[float]:
    return [float(part.double().sum()) for part in (logprobs * WEIGHTS).split(LENGTHS)]


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.1, 0.6])
@pytest.mark.parametrize("kind", ["sigmoid", "hinge", "ipo"])
def test_loss_and_slopes_are_trl_s(logprobs: torch.Tensor, kind: str, beta: float) -> None:
    leaf = logprobs.double().requires_grad_()
    expected = dpo_loss(leaf.split(LENGTHS), (WEIGHTS != 0).split(LENGTHS), REFERENCE, kind, beta)
    expected.backward()
    found = evaluate(logprobs, kind=kind, beta=beta, scale=0.5)  # a mean over two pairs
    # TRL adds up and scales in another order: equal here by luck, at most 7.7e-16 in 200 other draws.
    assert found.loss == pytest.approx(float(expected.detach()), rel=2e-15, abs=0)
    assert leaf.grad is not None
    assert torch.allclose(found.slopes.double(), leaf.grad, rtol=4e-7, atol=0)  # rounded once: 6e-8


def test_label_smoothing_weighs_the_flipped_pair(logprobs: torch.Tensor) -> None:
    chosen, rejected = -2.0, -5.0  # with the reference -1 and -1.5: ratios -1 and -3.5, margin 0.4 * 2.5 = 1
    loss = PreferenceLoss(kind="sigmoid", beta=0.4, label_smoothing=0.25)
    function = PreferenceLossFunction(loss, np.array([-1.0, -1.5], np.float32))
    tokens = loss_tokens(torch.tensor([chosen, rejected]), torch.ones(2), torch.tensor([0, 1]), torch.zeros(2))
    found = function.value(tokens)
    # 0.75 * log(1 + exp(-1)) + 0.25 * log(1 + exp(1)) = 0.75 * 0.3132617 + 0.25 * 1.3132617
    assert found.loss == pytest.approx(0.5632617, abs=1e-7)
    # d/d margin: -0.75 * sig(-1) + 0.25 * sig(1) = -0.75 * 0.2689414 + 0.25 * 0.7310586 = -0.0189414; times beta
    assert found.slopes.tolist() == pytest.approx([-0.0075766, 0.0075766], abs=1e-7)


def test_orpo_by_hand() -> None:
    """Mean log-probabilities log 0.8 and log 0.5: odds 4 and 1, log odds ratio log 4, -log sig(log 4) = log 1.25."""
    logprobs = torch.tensor([math.log(0.8), math.log(0.8), math.log(0.5), 7.0])
    tokens = loss_tokens(logprobs, torch.tensor([2.0, 1.0, 1.0, 0.0]), torch.tensor([0, 0, 1, 1]), torch.zeros(4))
    found = PreferenceLossFunction(PreferenceLoss(kind="orpo", beta=0.1), None).value(tokens)
    assert found.loss == pytest.approx(-math.log(0.8) + 0.1 * math.log(1.25), rel=1e-7)
    assert found.metrics["sft_loss"] == pytest.approx(0.2231436, abs=1e-7)
    assert found.metrics["odds_ratio_loss"] == pytest.approx(0.2231436, abs=1e-7)
    # d log odds / d mean = 1 / (1 - p): 5 and 2; d loss / d log odds ratio = -0.1 * (1 - 0.8) = -0.02
    expected = [-(1 + 0.02 * 5) / 2, -(1 + 0.02 * 5) / 2, 0.02 * 2, 0]
    assert found.slopes.tolist() == pytest.approx(expected, rel=2e-7)


def test_simpo_by_hand() -> None:
    """beta 2, gamma 0.5: 2 * (-0.5 - -1.0) - 0.5 = 0.5 and -log sig(0.5) = 0.4740770; sig(-0.5) = 0.3775407."""
    tokens = loss_tokens(torch.tensor([-0.25, -0.75, -1.0]), torch.ones(3), torch.tensor([0, 0, 1]), torch.zeros(3))
    found = PreferenceLossFunction(PreferenceLoss(kind="simpo", beta=2.0, gamma=0.5), None).value(tokens)
    assert found.loss == pytest.approx(0.4740770, abs=1e-7)
    assert found.slopes.tolist() == pytest.approx([-0.3775407, -0.3775407, 0.7550813], abs=1e-7)
    assert (found.metrics["rewards/chosen"], found.metrics["rewards/rejected"]) == (-1.0, -2.0)
    assert (found.metrics["logps/chosen"], found.metrics["logps/rejected"]) == (-0.5, -1.0)


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(map(str, s.values())))
def test_ftx_adds_the_chosen_answers_mean_and_scale_multiplies_all(
    logprobs: torch.Tensor, settings: dict[str, Any]
) -> None:
    plain = {key: value for key, value in settings.items() if key not in ("ftx", "scale")}
    sums = answer_sums(logprobs)
    nll = -sums[0] / COUNTED[0] - sums[2] / COUNTED[2]
    expected = settings.get("scale", 1.0) * (evaluate(logprobs, **plain).loss + settings.get("ftx", 0.0) * nll)
    assert evaluate(logprobs, **settings).loss == pytest.approx(expected, rel=1e-15, abs=0)


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(map(str, s.values())))
def test_every_slope_is_the_difference_that_its_logprob_makes(logprobs: torch.Tensor, settings: dict[str, Any]) -> None:
    step = 1e-5
    slopes = evaluate(logprobs, **settings).slopes
    assert not slopes[WEIGHTS == 0].any()
    for i in range(len(logprobs)):
        moved = [logprobs.double().index_add(0, torch.tensor([i]), torch.tensor([d]).double()) for d in (step, -step)]
        up, down = (evaluate(value, **settings).loss for value in moved)
        assert float(slopes[i]) == pytest.approx((up - down) / (2 * step), rel=6e-7, abs=1e-10)


def test_metrics_are_sums_over_pairs_under_llama_factory_s_names(logprobs: torch.Tensor) -> None:
    sums = np.array(answer_sums(logprobs))
    found = evaluate(logprobs, kind="sigmoid", beta=0.1, scale=0.5).metrics
    rewards = 0.1 * (sums - REFERENCE)
    logits = [float(part.double().mean()) for part in MEAN_LOGITS.split(LENGTHS)]
    assert found == pytest.approx(
        {
            "rewards/chosen": rewards[0] + rewards[2],
            "rewards/rejected": rewards[1] + rewards[3],
            "rewards/accuracies": float((rewards[0] > rewards[1]) + (rewards[2] > rewards[3])),
            "rewards/margins": rewards[0] - rewards[1] + rewards[2] - rewards[3],
            "logps/chosen": sums[0] + sums[2],
            "logps/rejected": sums[1] + sums[3],
            "logits/chosen": logits[0] + logits[2],
            "logits/rejected": logits[1] + logits[3],
        },
        rel=2e-15,
        abs=0,
    )
    means = sums / COUNTED
    averaged = evaluate(logprobs, kind="ipo", beta=0.1).metrics
    assert averaged["logps/chosen"] == means[0] + means[2]
    ratio = (sums - REFERENCE) / COUNTED
    assert averaged["rewards/margins"] == pytest.approx(
        0.1 * (ratio[0] - ratio[1] + ratio[2] - ratio[3]), rel=1e-15, abs=0
    )


def test_without_a_reference_s_numbers_the_model_is_its_own_reference(logprobs: torch.Tensor) -> None:
    loss = PreferenceLoss(kind="sigmoid", beta=0.1)
    found = PreferenceLossFunction(loss, None).value(loss_tokens(logprobs, WEIGHTS, SEQUENCE, MEAN_LOGITS))
    assert found.loss == 2 * math.log(2)
    assert found.metrics["rewards/margins"] == found.metrics["rewards/accuracies"] == 0


def test_pairs_apart_are_the_pairs_together(logprobs: torch.Tensor) -> None:
    """A microbatch holds some pairs of a call; the reference is the whole call's."""
    function = PreferenceLossFunction(PreferenceLoss(kind="sigmoid", beta=0.4), REFERENCE)
    whole = function.value(loss_tokens(logprobs, WEIGHTS, SEQUENCE, MEAN_LOGITS))
    parts = [SEQUENCE >= 2, SEQUENCE < 2]
    apart = [function.value(loss_tokens(logprobs[p], WEIGHTS[p], SEQUENCE[p], MEAN_LOGITS[p])) for p in parts]
    assert sum(part.loss for part in apart) == whole.loss
    for part, value in zip(parts, apart, strict=True):
        assert torch.equal(whole.slopes[part], value.slopes)
    for name, total in whole.metrics.items():
        assert total == sum(value.metrics[name] for value in apart)


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(map(str, s.values())))
@pytest.mark.parametrize("values", [(0.0, 0.0), (0.0, -1e4), (-1e4, 0.0), (-1e-9, -1e-9), (-1e4, -1e4)])
def test_loss_and_slopes_stay_finite_at_the_ends(settings: dict[str, Any], values: tuple[float, float]) -> None:
    logprobs = torch.where(SEQUENCE % 2 == 0, *values).float()
    found = evaluate(logprobs, **settings)
    assert math.isfinite(found.loss)
    assert torch.isfinite(found.slopes).all()
    assert all(math.isfinite(value) for value in found.metrics.values())


def test_odds_keep_their_digits_where_a_probability_is_almost_one() -> None:
    """log(1 - exp(-1e-7)) is log(1e-7); log1p(-exp(x)) has 9 digits of it in float64, in float32 none."""
    logprobs = torch.tensor([-1e-7, -1e-6])
    tokens = loss_tokens(logprobs, torch.ones(2), torch.tensor([0, 1]), torch.zeros(2))
    found = PreferenceLossFunction(PreferenceLoss(kind="orpo", beta=1.0), None).value(tokens)
    chosen, rejected = (math.exp(x) / -math.expm1(x) for x in logprobs.tolist())
    expected = math.log1p(rejected / chosen)
    assert found.metrics["odds_ratio_loss"] == pytest.approx(expected, rel=7e-15, abs=0)  # 7.3e-16 measured


def test_what_is_no_pair_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="there are 3 of them"):
        check_pairs([1, 1, 1], np.ones(3, np.float32))
    check_pairs([2, 1], np.array([0, 1, -1], np.float32))
    with pytest.raises(InvalidValueError, match=r"pair 1: the rejected answer \(sequence 3\) has no target"):
        check_pairs([2, 1, 1, 2], np.array([0, 1, 1, 1, 0, 0], np.float32))


def test_a_margin_that_the_reference_s_rounding_makes_prefers_neither_answer() -> None:
    sums = torch.tensor([[-31.0000001, -17.0000003], [-31.5, -40.25]], dtype=torch.float64)
    reference = torch.tensor(sums.float().numpy() + np.array([[0, 0], [-1, 1]], np.float32), dtype=torch.float64)
    answers = Answers(sums, torch.full((2, 2), 5.0, dtype=torch.float64), reference)
    for kind in ("sigmoid", "ipo"):
        found = _metrics(PreferenceLoss(kind=kind, beta=0.1), answers, torch.zeros(2, 2))
        assert found["rewards/accuracies"] == 1
