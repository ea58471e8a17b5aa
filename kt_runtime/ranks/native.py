"""The exchange of ranks as the native step calls it, and tensors through it.

Two ways (csrc/ranks): memory that the processes of one machine share (`shared_memory_of`), and sockets between ranks of
several machines (`connections.py`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from kt_runtime import _experts
from kt_runtime.errors import KtError, RuntimeFault
from kt_runtime.experts.native import capsule, translated_errors
from kt_runtime.ranks.share import Share

PATIENCE_SECONDS = 7.0
"""Longest wait, in shared memory, for a rank that neither answers nor uses its core."""


DTYPES = (torch.float32, torch.bfloat16, torch.int32, torch.int64)
"""Dtypes of tensors that ranks exchange."""


class NativeExchange:
    """An `Exchange` of tensors over a native one. Raises LostRankError when another rank is lost: for good."""

    def __init__(self, share: Share, native: _experts.Exchange, *, shares_memory: bool = False) -> None:
        self.share, self.native, self.shares_memory = share, native, shares_memory

    @property
    def waited_s(self) -> float:
        return self.native.waited_seconds

    @property
    def sent_bytes(self) -> int:
        return self.native.sent_bytes

    def all_columns(self, part: Tensor) -> Tensor:
        whole = torch.empty((len(part), self.share.num_ranks * part.shape[1]), dtype=part.dtype)
        own = self.share.of(whole.shape[1], "columns") if part.shape[1] else range(0)
        whole[:, own.start : own.stop] = part
        with translated_errors():
            self.native.gather_columns(capsule(whole, "part"))
        return whole

    def columns_of_rows(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        width = len(self.share.of(rows.shape[1], "columns"))
        received = torch.empty((sum(counts), width), dtype=rows.dtype)
        with translated_errors():
            self.native.gather_rows(capsule(rows.contiguous(), "rows"), list(counts), capsule(received, "received"))
        return received

    def rows_of_first(self, rows: Tensor, count: int) -> Tensor:
        received = torch.empty((count, rows.shape[1]), dtype=rows.dtype)
        counts = [count, *[0] * (self.share.num_ranks - 1)]
        with translated_errors():
            self.native.gather_rows(capsule(rows.contiguous(), "rows"), counts, capsule(received, "received"))
        return received


def shared_memory_of(group: dist.ProcessGroup, patience_seconds: float = PATIENCE_SECONDS) -> NativeExchange:
    """The exchange of a group whose processes are on one machine; every rank must call it. Raises RuntimeFault, on all
    ranks, if one of them can't reach the memory.

    Rank 0 makes a file in memory, which has no name; the others open it through rank 0's descriptor.
    """
    share = Share(dist.get_rank(group), dist.get_world_size(group))
    size = _experts.Exchange.file_bytes(share.num_ranks)
    with contextlib.ExitStack() as kept:
        made = kept.enter_context(_memory_file(size)) if share.rank == 0 else -1
        processes: list[tuple[int, int] | None] = [None] * share.num_ranks
        dist.all_gather_object(processes, (os.getpid(), made), group=group)
        pids = [pid for pid, _ in filter(None, processes)]
        opened, problem = None, ""
        try:
            descriptor = made if share.rank == 0 else kept.enter_context(_opened(pids[0], _descriptor(processes)))
            with translated_errors():
                opened = _experts.Exchange.shared(descriptor, pids, share.rank, patience_seconds)
        except (OSError, KtError) as error:
            problem = f"rank {share.rank}: {error}"
        problems: list[str | None] = [None] * share.num_ranks
        dist.all_gather_object(problems, problem, group=group)  # rank 0's descriptor stays open until all have it
    if opened is None or any(problems):
        raise RuntimeFault(f"the ranks can't share memory: {'; '.join(filter(None, problems))}")
    return NativeExchange(share, opened, shares_memory=True)


def _descriptor(processes: Sequence[tuple[int, int] | None]) -> int:
    return next(made for _, made in filter(None, processes))


@contextlib.contextmanager
def _memory_file(size: int) -> Iterator[int]:
    descriptor = os.memfd_create("kt-runtime-ranks", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, size)
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _opened(pid: int, number: int) -> Iterator[int]:
    descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
