"""How the sequences of one training call are cut into microbatches.

Sequences are padded on the right: with causal attention nothing that is real ever looks at padding, so that no mask is
needed; padding never reaches the routed experts nor the loss.

Shapes: B sequences, S longest of them, N real tokens of the call, M real tokens of the microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kt_runtime.errors import InvalidValueError


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
class Microbatch:
    """`tokens` [B, S], padded with 0. `real` [M]: index into the flattened [B * S] of each real token. `padding`
    [B * S]: True where none is; None when all are real.

    `where` [M]: index of the same tokens in the call's flat arrays. `targets`, `weights`: [M].
    """

    tokens: torch.Tensor
    real: torch.Tensor
    padding: torch.Tensor | None
    where: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor


def split(batch: TrainingBatch, max_tokens: int, device: torch.device) -> list[Microbatch]:
    """Sequences by falling length, as many in a microbatch as fit into `max_tokens` with padding; one at least."""
    starts = np.cumsum([0, *batch.lengths])
    order = sorted(range(len(batch.lengths)), key=lambda index: -batch.lengths[index])
    groups: list[list[int]] = []
    for index in order:
        if groups and (len(groups[-1]) + 1) * batch.lengths[groups[-1][0]] <= max_tokens:
            groups[-1].append(index)
        else:
            groups.append([index])
    return [_microbatch(batch, group, starts, device) for group in groups]


def _microbatch(
    batch: TrainingBatch, group: list[int], starts: npt.NDArray[np.int64], device: torch.device
) -> Microbatch:
    longest = batch.lengths[group[0]]
    tokens = np.zeros((len(group), longest), dtype=np.int64)
    real, where = [], []
    is_padding = np.ones(tokens.shape, dtype=bool)
    for row, index in enumerate(group):
        length, start = batch.lengths[index], int(starts[index])
        tokens[row, :length] = batch.tokens[start : start + length]
        is_padding[row, :length] = False
        real.append(np.arange(length) + row * longest)
        where.append(np.arange(length) + start)
    flat = np.concatenate(where)
    return Microbatch(
        tokens=torch.from_numpy(tokens).to(device),
        real=torch.from_numpy(np.concatenate(real)).to(device),
        padding=torch.from_numpy(is_padding.reshape(-1)).to(device) if is_padding.any() else None,
        where=torch.from_numpy(flat),
        targets=torch.from_numpy(batch.targets[flat].astype(np.int64)).to(device),
        weights=torch.from_numpy(batch.weights[flat].astype(np.float32)).to(device),
    )
