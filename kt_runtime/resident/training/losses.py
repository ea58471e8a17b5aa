"""The interface of a loss, the cross-entropy, and the steps between hidden states and log-probabilities.

A loss gets the log-probabilities of the targets, and returns its value and the derivative (slope) for each of them.
`hidden_gradient` propagates the slopes to the hidden state: with p = softmax(z) and c = dL/dlogp[t],
dL/dz = c * (onehot(t) - p).

Logits are computed in the model's dtype and the log-softmax in float32, as SGLang 0.5.23 does when it serves
(`sglang.srt.layers.logits_processor`). `loss_slices` computes logits for a few tokens at a time.

Shapes: N tokens, M loss tokens of a microbatch, H hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from kt_runtime.ops.matmul import frozen_linear, gradient_product
from kt_runtime.resident.twin.split import SplitVocabulary

MAX_LOGITS_ELEMENTS = 1 << 24  # 64 MiB in float32


@dataclass(frozen=True)
class LossTokens:
    """Input of a loss, all [M]. `where`: a token's index in the call's flat arrays; `sequence`: index of its sequence
    in the call; both on the CPU.

    `mean_logits`: mean over the vocabulary; set only for a loss that `is_paired`, else zeros.
    """

    logprobs: torch.Tensor
    weights: torch.Tensor
    where: torch.Tensor
    sequence: torch.Tensor
    mean_logits: torch.Tensor


@dataclass(frozen=True)
class LossValue:
    """`slopes` [M]: dL/dlogprob, float32. `metrics`: sums, so that microbatches add up."""

    loss: float
    slopes: torch.Tensor
    metrics: dict[str, float] = field(default_factory=dict)


class LossFunction(Protocol):
    """`is_paired`: sequences 2 i and 2 i + 1 of the call are a pair and must be in one microbatch."""

    is_paired: bool

    def slopes_ahead(self, weights: torch.Tensor) -> torch.Tensor | None:
        """The slopes [M] if they do not depend on the log-probabilities (so that one pass is enough), else None."""
        ...

    def value(self, tokens: LossTokens) -> LossValue: ...


class WeightedCrossEntropy:
    """L = sum(weights * -logprobs). A weight of 0 excludes the token, even if its log-probability is not finite."""

    is_paired = False

    def slopes_ahead(self, weights: torch.Tensor) -> torch.Tensor | None:
        return -weights

    def value(self, tokens: LossTokens) -> LossValue:
        counted = tokens.weights != 0
        loss = -(tokens.weights[counted].double() * tokens.logprobs[counted].double()).sum()
        return LossValue(float(loss), -tokens.weights)


def tokens_per_chunk(vocabulary: int) -> int:
    return max(1, MAX_LOGITS_ELEMENTS // vocabulary)


def log_softmax(hidden: torch.Tensor, head: torch.Tensor | SplitVocabulary) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and log-probabilities [N, V], float32. `hidden` [N, H]: the final norm's output; `head` [V, H]."""
    logits = (frozen_linear(hidden, head) if isinstance(head, torch.Tensor) else head.logits(hidden)).float()
    return logits, torch.log_softmax(logits, dim=-1)


def hidden_gradient(
    everything: torch.Tensor, targets: torch.Tensor, slopes: torch.Tensor, head: torch.Tensor | SplitVocabulary
) -> torch.Tensor:
    """Gradient [N, H] of the hidden state, in the head's dtype. Overwrites `everything`, the result of `log_softmax`.

    A token with slope 0 costs nothing.
    """
    gradient = torch.zeros(len(targets), head.shape[1], dtype=head.dtype, device=everything.device)
    rows = slopes.nonzero()[:, 0]
    if len(rows) < len(targets):
        everything, targets, slopes = everything[rows], targets[rows], slopes[rows]
    by_logits = everything.exp_().mul_(-slopes[:, None])
    by_logits.scatter_add_(1, targets[:, None], slopes[:, None])
    by_logits = by_logits.to(head.dtype)
    gradient[rows] = gradient_product(by_logits, head) if isinstance(head, torch.Tensor) else head.by_hidden(by_logits)
    return gradient
