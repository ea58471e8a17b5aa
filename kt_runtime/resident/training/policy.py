r"""Policy-gradient losses over sampled tokens, for reinforcement learning.

For a token with present log-probability p, sampler's log-probability q, advantage A and weight w, let d = p - q and
r = exp(d). Let clip(x) limit x to [`clip_low`, `clip_high`]. A call's loss is the sum over its counted tokens (w not 0)
of w times

    importance_sampling   -r A
    ppo                   -min(r A, clip(r) A)
                          (PPO, arXiv 1707.06347, eq. 7)
    cispo                 -c A p, c = clip(r) without gradient
                          (MiniMax-M1, arXiv 2506.13585, eq. 4; here also with a lower bound)
    dro                   -(A p - beta/2 d^2)
                          (DRO, arXiv 2405.19107; the per-token form of the Tinker API)
    gspo                  -min(s A, clip(s) A), s = exp(mean of d over the sequence's counted tokens)
                          (GSPO, arXiv 2507.18071, eq. 5, which also divides by the number of tokens: weights 1/n)

These are sums, never means, so that calls add up. Names, signs and defaults are those of the Tinker API.

Metrics, as sums over counted tokens, each with weight 1: `kl/k1` (-d) and `kl/k3` (r - 1 - d), estimates of the
divergence of the policy from the sampler (http://joschu.net/blog/kl-approx.html); `clipped`: tokens whose ratio was
replaced by a bound; `tokens`. k3 is exactly 0 where sampler and trainer agree to the bit.

Everything is float64 on the CPU. Shapes: N tokens of the call, M loss tokens of a microbatch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kt_runtime.errors import InvalidValueError
from kt_runtime.resident.training.losses import LossTokens, LossValue
from kt_runtime.wire import Samples
from kt_runtime.wire.messages import PolicyLoss

LOWEST_LOGPROB = -1e4
HIGHEST_LOGPROB = 1e-3  # log-softmax in float32 may round to a little more than 0


@dataclass(frozen=True)
class Sampled:
    """Counted tokens only, [M] and float64. `sequence` [M]: each token's index among the sequences, 0 to Q - 1."""

    present: torch.Tensor
    past: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    sequence: torch.Tensor

    @property
    def differences(self) -> torch.Tensor:
        return self.present - self.past


@dataclass(frozen=True)
class Terms:
    """`losses`: each token's contribution. `slopes`: the derivative of their sum by each token's log-probability.

    `is_clipped`: tokens whose ratio was replaced by a bound. All [M].
    """

    losses: torch.Tensor
    slopes: torch.Tensor
    is_clipped: torch.Tensor


class PolicyLossFunction:
    """`samples` [N]: those of the call's targets."""

    is_paired = False

    def __init__(self, settings: PolicyLoss, samples: Samples) -> None:
        self._settings = settings
        self._sampled = torch.from_numpy(samples.logprobs.astype(np.float64))
        self._advantages = torch.from_numpy(samples.advantages.astype(np.float64))

    def slopes_ahead(self, weights: torch.Tensor) -> torch.Tensor | None:
        return None

    def value(self, tokens: LossTokens) -> LossValue:
        # Only counted tokens are computed at all: a masked one can't give NaN.
        counted = (tokens.weights != 0).cpu()
        where = tokens.where[counted]
        batch = Sampled(
            tokens.logprobs.cpu()[counted].double(),
            self._sampled[where],
            self._advantages[where],
            tokens.weights.cpu()[counted].double(),
            torch.unique(tokens.sequence[counted], return_inverse=True)[1],
        )
        terms = token_terms(self._settings, batch)
        slopes = torch.zeros(len(counted), dtype=torch.float64)
        slopes[counted] = terms.slopes
        slopes = slopes.to(tokens.logprobs.device, torch.float32)
        return LossValue(float(terms.losses.sum()), slopes, _metrics(batch, terms))


def check_samples(samples: Samples, weights: npt.NDArray[np.float32]) -> None:
    """Raises InvalidValueError for a negative weight, and for a counted target's impossible log-probability."""
    if (weights < 0).any():
        first = int(np.argmax(weights < 0))
        raise InvalidValueError(f"weights[{first}] is {weights[first]}; a policy loss takes weights from 0")
    wrong = (weights != 0) & ~((samples.logprobs >= LOWEST_LOGPROB) & (samples.logprobs <= HIGHEST_LOGPROB))
    if wrong.any():
        first = int(np.argmax(wrong))
        raise InvalidValueError(
            f"sampled[{first}] is {samples.logprobs[first]}; a log-probability is between {LOWEST_LOGPROB:g} and 0"
        )


def token_terms(settings: PolicyLoss, batch: Sampled) -> Terms:
    return _KINDS[settings.kind](settings, batch)


def _importance_sampling(settings: PolicyLoss, batch: Sampled) -> Terms:
    losses = -batch.weights * batch.differences.exp() * batch.advantages
    return Terms(losses, losses, torch.zeros_like(losses, dtype=torch.bool))


def _ppo(settings: PolicyLoss, batch: Sampled) -> Terms:
    gain, is_clipped = _clipped_gain(settings, batch.differences.exp(), batch.advantages)
    losses = -batch.weights * gain
    return Terms(losses, torch.where(is_clipped, 0.0, losses), is_clipped)


def _cispo(settings: PolicyLoss, batch: Sampled) -> Terms:
    ratio = batch.differences.exp()
    low, high = settings.bounds
    clipped = ratio.clamp(low, high)
    slopes = -batch.weights * clipped * batch.advantages
    return Terms(slopes * batch.present, slopes, clipped != ratio)


def _dro(settings: PolicyLoss, batch: Sampled) -> Terms:
    differences, beta = batch.differences, settings.penalty
    losses = -batch.weights * (batch.advantages * batch.present - beta / 2 * differences**2)
    slopes = -batch.weights * (batch.advantages - beta * differences)
    return Terms(losses, slopes, torch.zeros_like(losses, dtype=torch.bool))


def _gspo(settings: PolicyLoss, batch: Sampled) -> Terms:
    sequences = int(batch.sequence.max()) + 1 if len(batch.sequence) else 0
    counts = torch.bincount(batch.sequence, minlength=sequences).double()
    means = _sum_by(batch.sequence, batch.differences, sequences) / counts
    gain, is_clipped = _clipped_gain(settings, means.exp()[batch.sequence], batch.advantages)
    losses = -batch.weights * gain
    by_ratio = _sum_by(batch.sequence, torch.where(is_clipped, 0.0, losses), sequences)
    return Terms(losses, (by_ratio / counts)[batch.sequence], is_clipped)


_KINDS: dict[str, Callable[[PolicyLoss, Sampled], Terms]] = {
    "importance_sampling": _importance_sampling,
    "ppo": _ppo,
    "cispo": _cispo,
    "dro": _dro,
    "gspo": _gspo,
}


def _clipped_gain(
    settings: PolicyLoss, ratio: torch.Tensor, advantages: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """min(ratio A, clip(ratio) A), and where the minimum is the clipped one and so has no gradient."""
    low, high = settings.bounds
    is_clipped = ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))
    return torch.where(is_clipped, ratio.clamp(low, high), ratio) * advantages, is_clipped


def _sum_by(index: torch.Tensor, values: torch.Tensor, size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.float64).index_add_(0, index, values)


def _metrics(batch: Sampled, terms: Terms) -> dict[str, float]:
    differences = batch.differences
    return {
        "kl/k1": float(-differences.sum()),
        "kl/k3": float((torch.expm1(differences) - differences).sum()),
        "clipped": float(terms.is_clipped.sum()),
        "tokens": float(len(differences)),
    }
