r"""Preference losses over pairs of answers to one prompt, the chosen one c and the rejected one r.

Let s be the sum of an answer's counted log-probabilities, a = s / (number of counted tokens) their mean, and s', a' the
same for the reference. A pair's loss is

    sigmoid    -(1 - e) log sig(d) - e log sig(-d), d = beta ((s_c - s'_c) - (s_r - s'_r)), e the label smoothing
               (DPO, arXiv 2305.18290; smoothing: conservative DPO, https://ericmitchell.ai/cdpo.pdf)
    hinge      max(0, 1 - d), d as above
               (SLiC-HF, arXiv 2305.10425; RSO, arXiv 2309.06657)
    ipo        ((a_c - a'_c) - (a_r - a'_r) - 1 / (2 beta))^2
               (arXiv 2310.12036, eq. 17; means instead of sums as in TRL, which its authors confirmed)
    orpo       -a_c - beta log sig(o(a_c) - o(a_r)), o(a) = a - log(1 - exp a)
               (arXiv 2403.07691, eq. 6 and 7)
    simpo      -log sig(beta (a_c - a_r) - gamma)
               (arXiv 2405.14734, eq. 6)

`ftx` adds -ftx a_c to any of these losses. Names and values follow LLaMA-Factory (`pref_loss`, `pref_beta`, `pref_ftx`,
`dpo_label_smoothing`, `simpo_gamma`), including ipo's means, which TRL 1.16 uses too. For ipo and hinge, LLaMA-Factory
0.9.5 with TRL 0.24 computes sigmoid instead; this module does not.

Rewards, for the metrics: beta (s - s') for sigmoid and hinge, beta (a - a') for ipo, beta a for orpo and simpo.

Everything is float64 on the CPU: values per pair, not per token. Shapes: P pairs, M loss tokens of a microbatch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import logsigmoid, relu

from kt_runtime.errors import InvalidValueError
from kt_runtime.resident.training.losses import LossTokens, LossValue
from kt_runtime.wire.messages import PreferenceLoss

AVERAGED = ("ipo", "orpo", "simpo")
MOST_CERTAIN = -1e-12
"""Upper clamp of mean log-probabilities in odds, which are infinite at 0."""


@dataclass(frozen=True)
class Answers:
    """Values of P pairs, all [P, 2] (chosen, rejected) and float64.

    `sums`: sums of the counted log-probabilities. `counts`: numbers of counted tokens. `reference`: the reference's
    sums.
    """

    sums: torch.Tensor
    counts: torch.Tensor
    reference: torch.Tensor


class PreferenceLossFunction:
    """`reference` [sequences of the call]: the reference's sums. None: the loss has no reference, or the model is its
    own reference."""

    is_paired = True

    def __init__(self, settings: PreferenceLoss, reference: npt.NDArray[np.float32] | None) -> None:
        self._settings = settings
        self._reference = None if reference is None else torch.from_numpy(reference.astype(np.float64))

    def slopes_ahead(self, weights: torch.Tensor) -> torch.Tensor | None:
        return None

    def value(self, tokens: LossTokens) -> LossValue:
        settings, sequence = self._settings, tokens.sequence
        counted = (tokens.weights != 0).cpu()
        pairs, pair_of = torch.unique(sequence // 2, return_inverse=True)
        answer_of = 2 * pair_of + sequence % 2
        per_answer = 2 * len(pairs)
        counts = _sum_by(answer_of[counted], torch.ones(int(counted.sum())), per_answer)
        sums = _sum_by(answer_of[counted], tokens.logprobs.cpu()[counted], per_answer).requires_grad_()
        members = torch.stack([2 * pairs, 2 * pairs + 1], dim=1)
        reference = sums.detach().view(-1, 2) if self._reference is None else self._reference[members]
        with torch.enable_grad():
            answers = Answers(sums.view(-1, 2), counts.view(-1, 2), reference)
            losses = settings.scale * pair_losses(settings, answers)
            by_sum = torch.autograd.grad(losses.sum(), sums)[0]
        slopes = torch.where(counted, by_sum[answer_of], 0.0).to(tokens.logprobs.device, torch.float32)
        logits = _sum_by(answer_of, tokens.mean_logits.cpu(), per_answer) / torch.bincount(answer_of)
        metrics = _metrics(settings, answers, logits.view(-1, 2))
        return LossValue(float(losses.detach().sum()), slopes, metrics)


def check_pairs(lengths: list[int], weights: npt.NDArray[np.float32]) -> None:
    """Raises InvalidValueError for an odd number of sequences, or a sequence without a counted target."""
    if len(lengths) % 2:
        raise InvalidValueError(
            f"a preference loss takes pairs of sequences, chosen and rejected in turn; there are {len(lengths)} of them"
        )
    starts = np.cumsum([0, *lengths[:-1]])
    empty = np.flatnonzero(np.add.reduceat(weights != 0, starts, dtype=np.int64) == 0)
    if len(empty):
        pair, is_rejected = divmod(int(empty[0]), 2)
        raise InvalidValueError(
            f"pair {pair}: the {'rejected' if is_rejected else 'chosen'} answer (sequence {empty[0]}) has no target of "
            "a weight other than 0; a preference loss needs one or more in each answer"
        )


def pair_losses(settings: PreferenceLoss, answers: Answers) -> torch.Tensor:
    """[P], without `scale`; differentiable with respect to `answers.sums`."""
    means = answers.sums / answers.counts
    losses = _KINDS[settings.kind](settings, answers)
    return losses - settings.ftx * means[:, 0] if settings.ftx else losses


def _sigmoid(settings: PreferenceLoss, answers: Answers) -> torch.Tensor:
    margin = _margin(rewards(settings, answers))
    smoothing = settings.label_smoothing
    return -(1 - smoothing) * logsigmoid(margin) - smoothing * logsigmoid(-margin)


def _hinge(settings: PreferenceLoss, answers: Answers) -> torch.Tensor:
    return relu(1 - _margin(rewards(settings, answers)))


def _ipo(settings: PreferenceLoss, answers: Answers) -> torch.Tensor:
    ratios = (answers.sums - answers.reference) / answers.counts
    return (_margin(ratios) - 1 / (2 * settings.beta)) ** 2


def _orpo(settings: PreferenceLoss, answers: Answers) -> torch.Tensor:
    return -(answers.sums / answers.counts)[:, 0] + settings.beta * odds_ratio_losses(answers)


def _simpo(settings: PreferenceLoss, answers: Answers) -> torch.Tensor:
    return -logsigmoid(_margin(rewards(settings, answers)) - settings.gamma)


_KINDS = {"sigmoid": _sigmoid, "hinge": _hinge, "ipo": _ipo, "orpo": _orpo, "simpo": _simpo}


def odds_ratio_losses(answers: Answers) -> torch.Tensor:
    """ORPO's second term without its beta, [P]: -log sig(o(a_c) - o(a_r))."""
    means = (answers.sums / answers.counts).clamp(max=MOST_CERTAIN)
    return -logsigmoid(_margin(means - _log_1_minus_exp(means)))


def rewards(settings: PreferenceLoss, answers: Answers) -> torch.Tensor:
    """[P, 2], as the module's docstring defines them."""
    ratios = answers.sums - answers.reference if settings.has_reference else answers.sums
    return settings.beta * (ratios / answers.counts if settings.kind in AVERAGED else ratios)


def _margin(answers: torch.Tensor) -> torch.Tensor:
    return answers[:, 0] - answers[:, 1]


def _log_1_minus_exp(x: torch.Tensor) -> torch.Tensor:
    """log(1 - exp(x)) for x < 0, exact at both ends (Mächler 2012, "Accurately computing log(1 - exp(-|a|))")."""
    near_zero = x > -math.log(2)
    return torch.where(
        near_zero,
        torch.log(-torch.expm1(torch.where(near_zero, x, -1.0))),
        torch.log1p(-torch.exp(torch.where(near_zero, -1.0, x))),
    )


def _sum_by(index: torch.Tensor, values: torch.Tensor, size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.float64).index_add_(0, index, values.double())


def _rounding(settings: PreferenceLoss, answers: Answers) -> torch.Tensor:
    """[P]: bound of the margin's rounding error, due to float32 reference sums. A smaller margin prefers neither."""
    if not settings.has_reference:
        return torch.zeros(len(answers.sums), dtype=torch.float64)
    sums = answers.reference / answers.counts if settings.kind in AVERAGED else answers.reference
    return settings.beta * 2.0**-23 * sums.abs().sum(1)


@torch.no_grad()
def _metrics(settings: PreferenceLoss, answers: Answers, logits: torch.Tensor) -> dict[str, float]:
    """Sums over the pairs, of which LLaMA-Factory logs means. `logits` [P, 2]: means over sequence and vocabulary."""
    reward, means = rewards(settings, answers), answers.sums / answers.counts
    logps = means if settings.kind in AVERAGED else answers.sums
    found = {
        "rewards/chosen": reward[:, 0],
        "rewards/rejected": reward[:, 1],
        "rewards/accuracies": (_margin(reward) > _rounding(settings, answers)).double(),
        "rewards/margins": _margin(reward),
        "logps/chosen": logps[:, 0],
        "logps/rejected": logps[:, 1],
        "logits/chosen": logits[:, 0],
        "logits/rejected": logits[:, 1],
    }
    if settings.kind == "orpo" or settings.ftx:
        found["sft_loss"] = -means[:, 0]
    if settings.kind == "orpo":
        found["odds_ratio_loss"] = odds_ratio_losses(answers)
    return {name: float(values.sum()) for name, values in found.items()}
