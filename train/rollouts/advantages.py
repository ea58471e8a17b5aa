"""How the rewards of a group of answers to one prompt become advantages, and how much an answer's token weighs.

`advantage_estimator`, with rewards r of a group of G answers, lengths n in tokens, N answers in the step:

    grpo      (r - mean) / (std + 1e-4), std with G - 1; a token weighs 1 / (N n)
              (GRPO: DeepSeekMath, arXiv 2402.03300, eq. 3; the deviation and its floor as in TRL)
    rloo      r - mean of the other G - 1; a token weighs 1 / N: an answer's log-probability is a sum
              (RLOO: arXiv 2402.14740, eq. 7)
    dr_grpo   r - mean; a token weighs 1 / (N max_new_tokens), the same for every answer
              (Dr. GRPO: arXiv 2503.20783, section 3.2)

With `policy_loss: gspo` a token always weighs 1 / (N n), since its ratio is the whole sequence's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kt_runtime.train.recipe import Recipe

STD_FLOOR = 1e-4

Numbers = npt.NDArray[np.float64]


def group_advantages(rewards: Sequence[float], estimator: str) -> Numbers:
    """The advantages [G] of one group's rewards [G], G at least 2. Equal rewards give exactly 0."""
    values = np.asarray(rewards, np.float64)
    if (values == values[0]).all():  # a mean may be rounded
        return np.zeros(len(values))
    return _ESTIMATORS[estimator](values)


def token_weight(recipe: Recipe, num_answers: int, num_tokens: int) -> float:
    """The weight of each token of an answer with `num_tokens` tokens, in a step of `num_answers` answers."""
    if recipe.policy_loss == "gspo" or recipe.advantage_estimator == "grpo":
        return 1.0 / (num_answers * num_tokens)
    if recipe.advantage_estimator == "rloo":
        return 1.0 / num_answers
    return 1.0 / (num_answers * recipe.max_new_tokens)


def kl_advantages(sampled: Sequence[Numbers], reference: Sequence[Numbers], coefficient: float) -> list[Numbers]:
    """What the divergence from the reference adds to each token's advantage, one array for each answer.

    d = log-probability when sampled - the reference's; a token gets coefficient x (mean of d over all tokens - d), so
    that the sum over all tokens is 0 (tinker-cookbook 0.6.1, `incorporate_kl_penalty`).
    """
    differences = [mine - theirs for mine, theirs in zip(sampled, reference, strict=True)]
    mean = mean_divergence(differences)
    return [coefficient * (mean - difference) for difference in differences]


def mean_divergence(differences: Sequence[Numbers]) -> float:
    """The mean over all tokens of all answers, in nats."""
    return float(np.concatenate(list(differences)).mean())


def _grpo(rewards: Numbers) -> Numbers:
    return (rewards - rewards.mean()) / (rewards.std(ddof=1) + STD_FLOOR)


def _rloo(rewards: Numbers) -> Numbers:
    others = (rewards.sum() - rewards) / (len(rewards) - 1)
    return rewards - others


def _dr_grpo(rewards: Numbers) -> Numbers:
    return rewards - rewards.mean()


_ESTIMATORS: dict[str, Callable[[Numbers], Numbers]] = {"grpo": _grpo, "rloo": _rloo, "dr_grpo": _dr_grpo}
