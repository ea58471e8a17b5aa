"""What ranks send each other: columns to all, and rows to those that sum them. Shapes: T rows, C columns, N ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from kt_runtime import _experts
from kt_runtime.ranks.share import Share


class Exchange(Protocol):
    """All ranks make the same calls in the same order; a call returns when all have made it. `native`: for the step.

    `waited_s`: time in which this rank waited for others so far; `sent_bytes`: what it has sent to others.
    A rank that is lost is a LostRankError; nothing can be exchanged after it. `shares_memory`: all ranks are on one
    machine, where a byte costs two copies and not a network's time.
    """

    share: Share
    native: _experts.Exchange
    shares_memory: bool

    @property
    def waited_s(self) -> float: ...

    @property
    def sent_bytes(self) -> int: ...

    def all_columns(self, part: Tensor) -> Tensor:
        """[T, C] of each rank, equal in shape and dtype -> [T, N * C], the ranks' columns in their order."""
        ...

    def columns_of_rows(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """rows [counts[rank], C] of each rank -> [sum of counts, C / N]: this rank's columns of the rows of rank 0,
        then of rank 1, and so on."""
        ...

    def rows_of_first(self, rows: Tensor, count: int) -> Tensor:
        """[count, C] on rank 0, any [0, C] of that dtype on other ranks -> rank 0's rows, on all ranks."""
        ...
