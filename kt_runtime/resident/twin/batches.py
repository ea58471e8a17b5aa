"""Splits the sequences of one training call into microbatches.

Rows are padded on the right. With causal attention no real token ever sees padding, so no mask is needed. Padding
reaches neither the routed experts nor the loss.

A row holds one sequence, or a pair of a preference loss with the shared prompt only once:

    prefix | rest of the first | rest of the second | padding

Both rests continue the prefix: their positions count from the prefix's end, and the second does not see the first
(`Branch`). The prefix is the leading positions where both sequences have equal tokens, equal targets and weight 0. So
its computation is the same for both, and the loss needs only its log-probabilities.

Shapes: B rows, S longest of them, N tokens of the call, M loss tokens of the microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kt_runtime.errors import InvalidValueError

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TrainingBatch:
    """The arrays of a `Forward` or `ForwardBackward` message: flat, one sequence after the other, N tokens in all."""

    lengths: Sequence[int]
    tokens: npt.NDArray[np.int32]
    targets: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]

    def check(self, vocabulary: int, context_tokens: int) -> None:
        """Raises InvalidValueError for a token outside the vocabulary or a sequence longer than the context."""
        if max(self.lengths) > context_tokens:
            index = int(np.argmax(self.lengths))
            raise InvalidValueError(
                f"sequence {index} has {max(self.lengths)} tokens; the server's context has {context_tokens}"
            )
        for name, ids in (("tokens", self.tokens), ("targets", self.targets)):
            outside = (ids < 0) | (ids >= vocabulary)
            if outside.any():
                at = int(np.argmax(outside))
                raise InvalidValueError(f"{name}[{at}] is {ids[at]}; the vocabulary has ids 0 to {vocabulary - 1}")


@dataclass(frozen=True)
class Branch:
    """A row's fork: positions from `second` on see the first `prefix` positions, and each other causally."""

    prefix: int
    second: int


@dataclass(frozen=True)
class Microbatch:
    """`tokens` [B, S], padded with 0. `padding` [B * S]: True for padding; None if there is none.

    `positions` [B, S] and `branches` (one per row): both None if no row forks; positions are then 0 to S - 1.

    Loss tokens: `real` [M]: index into the flattened [B * S]; a shared prefix appears twice. `where` [M]: index of the
    same tokens in the call's flat arrays. `targets`, `weights`: [M]. `sequence` [M]: index of the sequence in the call;
    both sequences of a pair are in one microbatch. `where` and `sequence` are on the CPU.

    `num_computed`: tokens that the layers compute.
    """

    tokens: torch.Tensor
    real: torch.Tensor
    padding: torch.Tensor | None
    where: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor
    sequence: torch.Tensor
    num_computed: int
    positions: torch.Tensor | None = None
    branches: tuple[Branch, ...] | None = None


@dataclass(frozen=True)
class _Row:
    """Sequence `first`, then `second` without its first `prefix` tokens. `second` None: one sequence only."""

    first: int
    second: int | None
    prefix: int
    length: int


def split(batch: TrainingBatch, max_tokens: int, device: torch.device, *, pairs: bool = False) -> list[Microbatch]:
    """Sorts rows by falling length and packs them into microbatches of at most `max_tokens` padded tokens, or one row.

    pairs: sequences 2 i and 2 i + 1 share a row and their prefix. Raises InvalidValueError for an odd number of them.
    """
    starts = np.cumsum([0, *batch.lengths])
    rows = sorted(_pairs(batch, starts) if pairs else _singles(batch), key=lambda row: -row.length)
    groups: list[list[_Row]] = []
    for row in rows:
        if groups and (len(groups[-1]) + 1) * groups[-1][0].length <= max_tokens:
            groups[-1].append(row)
        else:
            groups.append([row])
    return [_microbatch(batch, group, starts, device) for group in groups]


def _singles(batch: TrainingBatch) -> list[_Row]:
    return [_Row(index, None, 0, length) for index, length in enumerate(batch.lengths)]


def _pairs(batch: TrainingBatch, starts: Integers) -> list[_Row]:
    if len(batch.lengths) % 2:
        raise InvalidValueError(f"{len(batch.lengths)} sequences are no pairs: chosen and rejected must take turns")
    rows = []
    for first in range(0, len(batch.lengths), 2):
        prefix = _common_prefix(batch, starts, first)
        rows.append(_Row(first, first + 1, prefix, batch.lengths[first] + batch.lengths[first + 1] - prefix))
    return rows


def _common_prefix(batch: TrainingBatch, starts: Integers, first: int) -> int:
    shorter = min(batch.lengths[first], batch.lengths[first + 1])
    one, other = (slice(int(start), int(start) + shorter) for start in starts[first : first + 2])
    same = (batch.tokens[one] == batch.tokens[other]) & (batch.targets[one] == batch.targets[other])
    same &= (batch.weights[one] == 0) & (batch.weights[other] == 0)
    return int(np.argmin(np.append(same, False)))


def _microbatch(batch: TrainingBatch, rows: list[_Row], starts: Integers, device: torch.device) -> Microbatch:
    longest = rows[0].length
    tokens = np.zeros((len(rows), longest), dtype=np.int64)
    positions = np.zeros_like(tokens)
    is_padding = np.ones(tokens.shape, dtype=bool)
    real, where, sequence = [], [], []
    for number, row in enumerate(rows):
        is_padding[number, : row.length] = False
        for index, places in _places(batch, row):
            flat = np.arange(len(places)) + starts[index]
            tokens[number, places] = batch.tokens[flat]
            positions[number, places] = np.arange(len(places))
            real.append(places + number * longest)
            where.append(flat)
            sequence.append(np.full(len(places), index))
    flat = np.concatenate(where)
    forks = any(row.second is not None for row in rows)
    return Microbatch(
        tokens=torch.from_numpy(tokens).to(device),
        real=torch.from_numpy(np.concatenate(real)).to(device),
        padding=torch.from_numpy(is_padding.reshape(-1)).to(device) if is_padding.any() else None,
        where=torch.from_numpy(flat),
        targets=torch.from_numpy(batch.targets[flat].astype(np.int64)).to(device),
        weights=torch.from_numpy(batch.weights[flat].astype(np.float32)).to(device),
        sequence=torch.from_numpy(np.concatenate(sequence)),
        num_computed=sum(row.length for row in rows),
        positions=torch.from_numpy(positions).to(device) if forks else None,
        branches=tuple(Branch(row.prefix, batch.lengths[row.first]) for row in rows) if forks else None,
    )


def _places(batch: TrainingBatch, row: _Row) -> list[tuple[int, Integers]]:
    """(index, positions of its tokens within the row) of each of the row's sequences."""
    first = np.arange(batch.lengths[row.first])
    if row.second is None:
        return [(row.first, first)]
    return [(row.first, first), (row.second, np.append(first[: row.prefix], np.arange(len(first), row.length)))]
