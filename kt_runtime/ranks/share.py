"""Which part of the model a rank has."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kt_runtime.errors import InvalidValueError


@dataclass(frozen=True)
class Share:
    """Rank `rank` of `num_ranks` has equal, consecutive parts of everything that is split."""

    rank: int
    num_ranks: int

    def of(self, total: int, what: str) -> range:
        """This rank's numbers of 0 to total - 1. `what`: a plural, for the message. Raises InvalidValueError unless
        the number of ranks divides `total`."""
        check_divides(self.num_ranks, total, what)
        size = total // self.num_ranks
        return range(self.rank * size, (self.rank + 1) * size)

    def placed(self, columns: Tensor, total: int) -> Tensor:
        """[..., total / num_ranks], this rank's columns -> [..., total], with -0.0 in the columns of the others.

        x + -0.0 is x for every x, also for 0.0 and -0.0: the sum of all ranks' results has the columns of each, bit
        for bit, in whatever order it is taken. So the engine's own sums over ranks need no change.
        """
        whole = torch.full((*columns.shape[:-1], total), -0.0, dtype=columns.dtype, device=columns.device)
        self.columns_of(whole).copy_(columns)
        return whole

    def columns_of(self, whole: Tensor) -> Tensor:
        """[..., total] -> a view of this rank's columns [..., total / num_ranks]."""
        own = self.of(whole.shape[-1], "columns")
        return whole[..., own.start : own.stop]


def check_divides(num_ranks: int, total: int, what: str) -> None:
    """Raises InvalidValueError with both values unless `num_ranks` divides `total`."""
    if total % num_ranks or not total:
        raise InvalidValueError(f"{total} {what} can't be split evenly over {num_ranks} ranks")
