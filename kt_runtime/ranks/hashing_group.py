"""What ranks send each other from a thread other than the engine's: rank 0 hashes weights of which each has a part.

The messages of the engine's thread (`Exchange`) have the same order on all ranks, which another thread's messages must
not disturb. So that thread has its own group of torch.distributed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from kt_runtime.ranks.share import Share

T = TypeVar("T")

CHUNK_BYTES = 1 << 20
PATIENCE = timedelta(days=1)
"""Timeout for a rank that hashes its part of a terabyte at low priority. A rank that has ended is noticed at once."""


class HashingGroup:
    """All ranks make the same calls in the same order, one at a time. Raises RuntimeError when a rank is lost."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.share = Share(dist.get_rank(group), dist.get_world_size(group))

    @property
    def is_first(self) -> bool:
        return self.share.rank == 0

    def gathered(self, own: T) -> list[T]:
        """The values `own` of all ranks, in their order, on rank 0; empty on the others."""
        found: list[T | None] | None = [None] * self.share.num_ranks if self.is_first else None
        dist.gather_object(own, found, group=self._group, group_dst=0)
        return cast(list[T], found or [])

    def sha256(self, own: Tensor, sizes: Sequence[int], rows: int) -> bytes:
        """On rank 0 the SHA-256 of a whole tensor's bytes, row by row; empty on the others.

        `own` [R, bytes of a row], uint8: this rank's rows, an even part of each of the pieces of `sizes` rows. `rows`:
        those of the whole tensor; rows from this number on are padding.
        """
        digest, end = hashlib.sha256(), 0
        for rank, part in _parts(self.share.num_ranks, sizes):
            count = max(0, min(len(part), rows - end))
            end += len(part)
            own_rows, width = own[part.start : part.start + count], own.shape[1]
            if rank == self.share.rank:
                self._give(own_rows.reshape(-1), digest)
            elif self.is_first:
                self._take(rank, count * width, digest)
        return digest.digest() if self.is_first else b""

    def _give(self, own: Tensor, digest: hashlib._Hash) -> None:
        if self.is_first:
            digest.update(own.numpy().data)
            return
        for start in range(0, len(own), CHUNK_BYTES):
            dist.send(own[start : start + CHUNK_BYTES], group=self._group, group_dst=0)

    def _take(self, rank: int, num_bytes: int, digest: hashlib._Hash) -> None:
        for start in range(0, num_bytes, CHUNK_BYTES):
            chunk = torch.empty(min(CHUNK_BYTES, num_bytes - start), dtype=torch.uint8)
            dist.recv(chunk, group=self._group, group_src=rank)
            digest.update(chunk.numpy().data)


def _parts(num_ranks: int, sizes: Sequence[int]) -> Iterator[tuple[int, range]]:
    """(rank, its rows by its own numbers) in the order of the whole."""
    start = 0
    for size in sizes:
        count = size // num_ranks
        for rank in range(num_ranks):
            yield rank, range(start, start + count)
        start += count
