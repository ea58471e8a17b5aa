"""Losses over the log-probabilities of given targets, a few tokens at a time.

The logits of a whole microbatch never exist at once: `target_logprobs` handles as many tokens as fit into
`MAX_LOGITS_ELEMENTS`, and turns the loss's derivative by each log-probability straight into the gradient by the hidden
state. With p = softmax(z) and c = dL/dlogp[t], dL/dz = c * (onehot(t) - p).

Logits are computed in the model's dtype and the log-softmax in float32, as SGLang 0.5.23 does when it serves
(`sglang.srt.layers.logits_processor`).

Shapes: N tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

MAX_LOGITS_ELEMENTS = 1 << 24  # 64 MiB in float32

LossSlope = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(logprobs [N], weights [N]) -> dL/dlogprobs [N], all float32. Token i's slope depends on token i alone."""


def cross_entropy_slope(logprobs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """L = sum(weights * -logprobs)."""
    return -weights


def weighted_loss(logprobs: torch.Tensor, weights: torch.Tensor) -> float:
    """sum(weights * -logprobs), added up in float64. A weight of 0 takes the token out, whatever its logprob is."""
    counted = weights != 0
    return float(-(weights[counted].double() * logprobs[counted].double()).sum())


SLOPES: dict[str, LossSlope] = {"cross_entropy": cross_entropy_slope}


def tokens_per_chunk(vocabulary: int) -> int:
    return max(1, MAX_LOGITS_ELEMENTS // vocabulary)


def target_logprobs(
    hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of `targets` [N] and of everything: ([N], [N, V]), float32.

    `hidden` [N, H] comes after the final norm; `head` [V, H] is lm_head's weight.
    """
    everything = torch.log_softmax(torch.nn.functional.linear(hidden, head).float(), dim=-1)
    return everything.gather(1, targets[:, None])[:, 0], everything


def hidden_gradient(
    everything: torch.Tensor, targets: torch.Tensor, slopes: torch.Tensor, head: torch.Tensor
) -> torch.Tensor:
    """Gradient [N, H] by the hidden state, in the head's dtype. Overwrites `everything` (as from `target_logprobs`)."""
    by_logits = everything.exp_().mul_(-slopes[:, None])
    by_logits.scatter_add_(1, targets[:, None], slopes[:, None])
    return by_logits.to(head.dtype) @ head
