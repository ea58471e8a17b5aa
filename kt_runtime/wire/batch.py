"""A batch of token sequences in wire layout: flat arrays, one sequence after the other, and the lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kt_runtime.errors import InvalidValueError

MAX_TOKEN = 2**31 - 1


@dataclass(frozen=True, eq=False)
class Batch:
    """`tokens` and `targets` int32 [N], `weights` float32 [N], N = sum(lengths).

    targets[i] is the token that should follow tokens[i]; weights[i] multiplies its loss (0: no loss).
    Raises InvalidValueError when the shapes don't fit, a token is negative or a weight is not finite.
    """

    tokens: npt.NDArray[np.int32]
    targets: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]
    lengths: list[int]

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1:
            raise InvalidValueError(f"batch: lengths {self.lengths}; there must be one or more, each at least 1")
        for name, dtype in (("tokens", np.int32), ("targets", np.int32), ("weights", np.float32)):
            object.__setattr__(self, name, _flat(name, getattr(self, name), dtype, sum(self.lengths)))

    @classmethod
    def from_sequences(
        cls,
        tokens: Sequence[Sequence[int]],
        targets: Sequence[Sequence[int]],
        weights: Sequence[Sequence[float]] | None = None,
    ) -> Batch:
        """Each argument has one entry per sequence. Without `weights` every target has weight 1."""
        if weights is None:
            weights = [[1.0] * len(sequence) for sequence in targets]
        lengths = [len(sequence) for sequence in tokens]
        for name, given in (("targets", targets), ("weights", weights)):
            if [len(sequence) for sequence in given] != lengths:
                raise InvalidValueError(
                    f"batch: {name} have lengths {[len(sequence) for sequence in given]}, the tokens have {lengths}"
                )
        flat = [[item for sequence in given for item in sequence] for given in (tokens, targets, weights)]
        return cls(np.array(flat[0]), np.array(flat[1]), np.array(flat[2]), lengths)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def split(self, flat: npt.NDArray[np.float32]) -> list[npt.NDArray[np.float32]]:
        """Splits [N] into one array (a view) per sequence."""
        return np.split(flat, np.cumsum(self.lengths)[:-1])


@dataclass(frozen=True, eq=False)
class Samples:
    """What a `PolicyLoss` needs of a batch's targets, float32 [N] each: `logprobs`, the log-probabilities with which
    the sampler chose them, and `advantages`. Values of targets with weight 0 have no effect.

    Raises InvalidValueError when the shapes differ or a number is not finite.
    """

    logprobs: npt.NDArray[np.float32]
    advantages: npt.NDArray[np.float32]

    def __post_init__(self) -> None:
        for name in ("logprobs", "advantages"):
            object.__setattr__(self, name, _flat(name, getattr(self, name), np.float32, len(self.logprobs)))

    @classmethod
    def from_sequences(cls, logprobs: Sequence[Sequence[float]], advantages: Sequence[Sequence[float]]) -> Samples:
        """Each argument has one entry per sequence."""
        flat = [np.array([item for sequence in given for item in sequence]) for given in (logprobs, advantages)]
        return cls(flat[0], flat[1])


def _flat(name: str, given: npt.ArrayLike, dtype: type, length: int) -> npt.NDArray[np.int32] | npt.NDArray[np.float32]:
    array = np.asarray(given)
    if array.shape != (length,):
        raise InvalidValueError(f"batch: {name} have shape {list(array.shape)}, the lengths add up to {length}")
    if dtype is np.int32:
        if array.dtype.kind not in "iu":
            raise InvalidValueError(f"batch: {name} have dtype {array.dtype}; they must be whole numbers")
        wrong = (array < 0) | (array > MAX_TOKEN)
        allowed = f"0 to {MAX_TOKEN}"
    else:
        if array.dtype.kind not in "iuf":
            raise InvalidValueError(f"batch: {name} have dtype {array.dtype}; they must be numbers")
        wrong = ~(np.abs(array) <= np.finfo(np.float32).max)
        allowed = "finite float32 numbers"
    if wrong.any():
        first = int(np.argmax(wrong))
        raise InvalidValueError(f"batch: {name}[{first}] is {array[first]}; allowed are {allowed}")
    return np.ascontiguousarray(array, dtype)
