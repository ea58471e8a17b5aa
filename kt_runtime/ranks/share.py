"""Which part of the model a rank has."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import accumulate

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


@dataclass(frozen=True)
class Pieces:
    """Columns, or rows, that consist of pieces of these `sizes`, one after another: of each a rank has an even part."""

    share: Share
    sizes: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.sizes)

    def own(self, whole: Tensor, dim: int = -1) -> Tensor:
        """`whole`, which has all columns or rows in `dim` -> this rank's: a view if there is one piece."""
        if len(self.sizes) == 1:
            own = self.share.of(self.total, "columns")
            return whole.narrow(dim, own.start, len(own))
        return whole.index_select(dim, _numbers(self.share, self.sizes))

    def placed(self, columns: Tensor) -> Tensor:
        """As `Share.placed`: [..., total / num_ranks], this rank's columns -> [..., total]."""
        if len(self.sizes) == 1:
            return self.share.placed(columns, self.total)
        whole = torch.full((*columns.shape[:-1], self.total), -0.0, dtype=columns.dtype)
        return whole.index_copy_(-1, _numbers(self.share, self.sizes), columns)

    def ordered(self, joined: Tensor, dim: int = -1) -> Tensor:
        """`joined`, which in `dim` has all of rank 0's, then all of rank 1's, and so on -> in the whole's order,
        perhaps `joined` itself."""
        return joined if len(self.sizes) == 1 else joined.index_select(dim, _places(self.share.num_ranks, self.sizes))


@cache
def _numbers(share: Share, sizes: tuple[int, ...]) -> Tensor:
    """Numbers of a rank's columns: int64."""
    ends = accumulate(sizes)
    each = [end - size + own for end, size in zip(ends, sizes, strict=True) for own in share.of(size, "columns")]
    return torch.tensor(each)


@cache
def _places(num_ranks: int, sizes: tuple[int, ...]) -> Tensor:
    """The place of each column among those of all ranks, rank after rank: int64."""
    return torch.cat([_numbers(Share(rank, num_ranks), sizes) for rank in range(num_ranks)]).argsort()


def check_divides(num_ranks: int, total: int, what: str) -> None:
    """Raises InvalidValueError with both values unless `num_ranks` divides `total`."""
    if total % num_ranks or not total:
        raise InvalidValueError(f"{total} {what} can't be split evenly over {num_ranks} ranks")
