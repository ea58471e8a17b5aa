"""What real ranks, connected by gloo, send each other."""

from __future__ import annotations

import pytest
import torch
from reference.server.real_ranks import run_ranks

from kt_runtime.ranks import Exchange

COUNTS = [2, 0, 3]  # rows of each rank


def rows_of(rank: int) -> torch.Tensor:
    return torch.arange(COUNTS[rank] * 6, dtype=torch.float32).view(-1, 6) + 100 * rank


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32])
def test_columns_of_all_ranks_in_their_order(dtype: torch.dtype) -> None:
    def work(exchange: Exchange) -> list[torch.Tensor]:
        own = torch.full((4, 2), exchange.share.rank, dtype=dtype)
        return [exchange.all_columns(own), exchange.all_columns(own[:0])]

    for some, none in run_ranks(3, work):
        assert some.dtype == dtype
        assert torch.equal(some, torch.tensor([[0, 0, 1, 1, 2, 2]], dtype=dtype).expand(4, 6))
        assert none.shape == (0, 6)


def test_each_rank_gets_its_columns_of_all_rows() -> None:
    def work(exchange: Exchange) -> torch.Tensor:
        return exchange.columns_of_rows(rows_of(exchange.share.rank), COUNTS)

    whole = torch.cat([rows_of(rank) for rank in range(3)])
    for rank, found in enumerate(run_ranks(3, work)):
        assert torch.equal(found, whole[:, 2 * rank : 2 * rank + 2])
