"""The slices between the last layer's forward and backward: final norm, lm_head, loss.

The logits of a whole microbatch never exist at once. Logits are computed in chunks of tokens that fit into
`MAX_LOGITS_ELEMENTS`, one slice per chunk. Slopes are the derivatives dL/dlogprob. A loss whose slopes are known ahead
(cross-entropy) needs one pass. A preference loss needs all log-probabilities of a pair before any slope: a first pass
computes these, a second pass recomputes the logits for the gradient, unless one chunk held everything.

The shared prompt of a pair is computed once, though both sequences have loss tokens there.

Autograd is off between slices. Shapes: M loss tokens of the microbatch, U distinct places among them, H hidden,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch

from kt_runtime.errors import NumericsError
from kt_runtime.resident.scheduler import Slice
from kt_runtime.resident.training.call import Call, CallResult
from kt_runtime.resident.training.losses import LossTokens, LossValue, hidden_gradient, log_softmax, tokens_per_chunk
from kt_runtime.resident.twin.batches import Microbatch
from kt_runtime.resident.twin.split import SplitVocabulary


@dataclass(frozen=True)
class _Places:
    """The distinct loss tokens: `real`, `targets` [U]. `of` [M]: each loss token's index among these; None: U = M."""

    real: torch.Tensor
    targets: torch.Tensor
    of: torch.Tensor | None

    @classmethod
    def of_microbatch(cls, microbatch: Microbatch, is_paired: bool, vocabulary: int) -> _Places:
        if not is_paired:
            return cls(microbatch.real, microbatch.targets, None)
        both, of = torch.unique(microbatch.real * vocabulary + microbatch.targets, return_inverse=True)
        return cls(both // vocabulary, both % vocabulary, of)

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """[U] to [M]."""
        return values if self.of is None else values[self.of]

    def gathered(self, values: torch.Tensor) -> torch.Tensor:
        """[M] to [U]: sums the values of each place."""
        if self.of is None:
            return values
        return values.new_zeros(len(self.real)).index_add_(0, self.of, values)


@dataclass(frozen=True)
class _Seen:
    """Results of the first pass for each place, all [U]."""

    logprobs: torch.Tensor
    is_correct: torch.Tensor
    mean_logits: torch.Tensor

    @classmethod
    def empty(cls, size: int, device: torch.device) -> _Seen:
        return cls(
            torch.zeros(size, device=device),
            torch.zeros(size, dtype=torch.bool, device=device),
            torch.zeros(size, device=device),
        )


def loss_of(
    call: Call, microbatch: Microbatch, hidden: torch.Tensor, result: CallResult
) -> Generator[Slice, None, torch.Tensor | None]:
    """Adds the microbatch's loss, log-probabilities and counts to `result`, one slice per chunk.

    `hidden` [B, S, H]: the last layer's output. Returns its gradient, None without backward. Raises NumericsError if
    the loss is not finite.
    """
    twin, loss = call.twin, call.loss
    yield Slice("loss begins", len(microbatch.real))
    with torch.no_grad():
        places = _Places.of_microbatch(microbatch, loss.is_paired, twin.vocabulary)
        counts = places.gathered((microbatch.weights != 0).float()) > 0
        normed = twin.final_norm(hidden.flatten(0, 1)[places.real])
        seen = _Seen.empty(len(normed), normed.device)
        slopes = loss.slopes_ahead(microbatch.weights) if call.backward else None
        by_normed = torch.zeros_like(normed)
    chunks = _chunks(len(normed), tokens_per_chunk(twin.vocabulary))
    kept: torch.Tensor | None = None
    for index, chunk in enumerate(chunks):
        yield _chunk_slice("loss" if slopes is None else "loss and gradient", chunks, index)
        with torch.no_grad():
            everything = _read_chunk(chunk, normed, twin.head, places, counts, seen, wants_logits=loss.is_paired)
            if slopes is not None:
                by_normed[chunk] = hidden_gradient(everything, places.targets[chunk], slopes[chunk], twin.head)
            elif len(chunks) == 1:
                kept = everything
            del everything
    yield Slice("loss ends", len(microbatch.real))
    value = _add_to(result, call, microbatch, places, seen)
    if not call.backward:
        return None
    if slopes is None:
        yield from _second_pass(chunks, normed, twin.head, places, value.slopes, kept, by_normed)
        yield Slice("final norm backward", len(microbatch.real))
    with torch.enable_grad():
        leaf = hidden.detach().requires_grad_()
        return torch.autograd.grad(twin.final_norm(leaf.flatten(0, 1)[places.real]), leaf, by_normed)[0]


def _chunks(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _chunk_slice(kind: str, chunks: list[slice], index: int) -> Slice:
    chunk = chunks[index]
    return Slice(kind, chunk.stop - chunk.start, max(1, len(chunks) - 1 - index))  # the last chunk is often shorter


def _read_chunk(
    chunk: slice,
    normed: torch.Tensor,
    head: torch.Tensor | SplitVocabulary,
    places: _Places,
    counts: torch.Tensor,
    seen: _Seen,
    *,
    wants_logits: bool,
) -> torch.Tensor:
    """Fills `seen` for one chunk and returns its log-probabilities over the vocabulary."""
    targets, counted = places.targets[chunk], counts[chunk]
    logits, everything = log_softmax(normed[chunk], head)
    seen.logprobs[chunk] = everything.gather(1, targets[:, None])[:, 0]
    seen.is_correct[chunk] = _is_argmax(logits, targets, counted)
    if wants_logits:
        seen.mean_logits[chunk] = logits.mean(-1)
    return everything


def _is_argmax(logits: torch.Tensor, targets: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """[N]: whether the target is the argmax. In bf16 several logits often tie; then the first counts, as in `argmax`.

    `argmax` costs five times as much as `amax`, so it runs only on rows whose target reaches the maximum.
    """
    reaches = counted & (logits.gather(1, targets[:, None])[:, 0] == logits.amax(-1))
    rows = reaches.nonzero()[:, 0]
    reaches[rows] = logits[rows].argmax(-1) == targets[rows]
    return reaches


def _second_pass(
    chunks: list[slice],
    normed: torch.Tensor,
    head: torch.Tensor | SplitVocabulary,
    places: _Places,
    slopes: torch.Tensor,
    kept: torch.Tensor | None,
    by_normed: torch.Tensor,
) -> Generator[Slice, None, None]:
    """Fills `by_normed` [U, H] from `slopes` [M]. `kept`: the first pass's log-probabilities, if there is one chunk."""
    with torch.no_grad():
        slopes = places.gathered(slopes)
    for index, chunk in enumerate(chunks):
        yield _chunk_slice("loss gradient", chunks, index)
        with torch.no_grad():
            everything = log_softmax(normed[chunk], head)[1] if kept is None else kept
            by_normed[chunk] = hidden_gradient(everything, places.targets[chunk], slopes[chunk], head)
            del everything


def _add_to(result: CallResult, call: Call, microbatch: Microbatch, places: _Places, seen: _Seen) -> LossValue:
    with torch.no_grad():
        logprobs, weights = places.spread(seen.logprobs), microbatch.weights
        mean_logits = places.spread(seen.mean_logits)
        tokens = LossTokens(logprobs, weights, microbatch.where, microbatch.sequence, mean_logits)
        value = call.loss.value(tokens)
        if not torch.isfinite(torch.tensor(value.loss)):
            raise NumericsError(f"the loss is {value.loss}; nothing was added to the gradient")
        result.loss += value.loss
        result.logprobs[microbatch.where] = logprobs.cpu()
        result.num_correct += int((places.spread(seen.is_correct) & (weights != 0)).sum())
        for name, number in value.metrics.items():
            result.metrics[name] = result.metrics.get(name, 0.0) + number
    return value
