"""Where the servers of a test compute, and how near two computations must be there.

Tests of real servers take the fixture `place`. It is `CPU` (tests/conftest.py) unless a folder's conftest gives
another: tests/gpu has a GPU's, in several variants. So one test body holds for every device; a new one is a `Place`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from reference.parity import Agreement  # imports torch, whose environment tests/conftest.py sets first


@dataclass(frozen=True)
class Place:
    """`device`: how the status's `device` begins. `options`: of `kt-runtime serve`, `passed_on`: of SGLang, for every
    server. `native_step`: kt-runtime's own step computes the decoder stack.

    `k3`, `largest`, `median`: the most that log-probabilities of training and of serving may differ, as in `Agreement`;
    0: they are equal to the bit. Serving twice (in another batch, after a cached prefix) differs as little.
    `float32_factor`: a log-probability in float32 may differ from Hugging Face's by so many times the tolerance of a
    CPU. `same_training`: training the same again gives the same bits.
    """

    name: str
    device: str
    options: tuple[str, ...] = ()
    passed_on: tuple[str, ...] = ()
    native_step: bool = False
    k3: float = 0.0
    largest: float = 0.0
    float32_factor: float = 1.0
    same_training: bool = True
    median: float = math.inf

    def __str__(self) -> str:
        return self.name

    def arguments(self, options: Sequence[str], passed_on: Sequence[str] = ()) -> list[str]:
        """Of `kt-runtime serve`: the place's and the test's own."""
        after = [*self.passed_on, *passed_on]
        return [*self.options, *options, *(["--", *after] if after else [])]

    def check(self, found: Agreement) -> None:
        """Training agrees with serving."""
        assert 0 <= found.k3 <= self.k3 and found.largest <= self.largest, f"{self}: {found}"
        assert found.median <= self.median, f"{self}: {found}"

    def check_same(self, found: npt.ArrayLike, expected: npt.ArrayLike) -> None:
        """Log-probabilities of the same tokens, computed another way."""
        one, other = np.asarray(found, np.float64), np.asarray(expected, np.float64)
        assert one.shape == other.shape
        difference = float(np.abs(one - other).max(initial=0.0))
        assert difference <= self.largest, f"{self}: {difference}"

    def check_losses(self, found: Sequence[float], expected: Sequence[float]) -> None:
        """Of the same training steps, done again."""
        rounding = 0.0 if self.same_training else self.largest
        np.testing.assert_allclose(np.array(found), np.array(expected), rtol=rounding, atol=rounding)


CPU = Place("cpu", "cpu", native_step=True)
