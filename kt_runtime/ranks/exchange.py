"""What ranks send each other: columns of all, and rows to those who sum them up. Shapes: T rows, C columns, N ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from kt_runtime.ranks.share import Share


class Exchange(Protocol):
    """All ranks make the same calls in the same order; a call returns when all have made it.

    `waited_s`: time in calls so far, `sent_bytes`: what this rank has sent to others in them.
    """

    share: Share
    waited_s: float
    sent_bytes: int

    def all_columns(self, part: Tensor) -> Tensor:
        """[T, C] of each rank, equal in shape and dtype -> [T, N * C], the ranks' columns in their order."""
        ...

    def columns_of_rows(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """rows [counts[rank], C] of each rank -> [sum of counts, C / N]: this rank's columns of the rows of rank 0,
        then of rank 1, and so on."""
        ...


class GroupExchange:
    """Through a group of torch.distributed, which gloo connects on CPUs. Bytes are moved, nothing is added up.

    Errors of the group (a rank that has ended) are RuntimeErrors.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.share = Share(dist.get_rank(group), dist.get_world_size(group))
        self.waited_s, self.sent_bytes = 0.0, 0
        self._group = group

    def all_columns(self, part: Tensor) -> Tensor:
        ranks, (rows, columns) = self.share.num_ranks, part.shape
        gathered = torch.empty((ranks, rows, columns), dtype=part.dtype)
        if part.numel():
            with self._counted((ranks - 1) * part.nbytes):
                dist.all_gather_into_tensor(_bytes(gathered), _bytes(part.contiguous()), group=self._group)
        return gathered.transpose(0, 1).reshape(rows, ranks * columns)

    def columns_of_rows(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        ranks, width = self.share.num_ranks, len(self.share.of(rows.shape[1], "columns"))
        received = torch.empty((sum(counts), width), dtype=rows.dtype)
        if received.numel():
            row_bytes = width * rows.element_size()
            parts = rows.view(len(rows), ranks, width).transpose(0, 1).contiguous()
            with self._counted((ranks - 1) * len(rows) * row_bytes):
                dist.all_to_all_single(
                    _bytes(received),
                    _bytes(parts),
                    [count * row_bytes for count in counts],
                    [len(rows) * row_bytes] * ranks,
                    group=self._group,
                )
        return received

    @contextmanager
    def _counted(self, num_bytes: int) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.waited_s += time.perf_counter() - began
        self.sent_bytes += num_bytes


def _bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8)
