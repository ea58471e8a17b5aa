"""SGLang's gather of logits and its agreement on tokens, between real ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from reference.ranks.real_ranks import KINDS, run_ranks

from kt_runtime.ranks import Exchange
from kt_runtime.sglang_patch.ranks import collectives, group


def left_to_sglang(*args: Any, **kwargs: Any) -> str:
    return "SGLang's"


def gather(exchange: Exchange, part: torch.Tensor, dim: int = -1) -> Any:
    coordinator = SimpleNamespace(world_size=exchange.share.num_ranks)
    with mock.patch.object(group, "exchange", lambda: exchange):
        return collectives.all_gather(left_to_sglang, coordinator, part, dim)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_gathered_and_other_shapes_are_sglangs(kind: str) -> None:
    def work(exchange: Exchange) -> list[Any]:
        logits = torch.full((2, 3), exchange.share.rank, dtype=torch.bfloat16)
        others = [gather(exchange, logits, 0), gather(exchange, logits[0]), gather(exchange, logits.half())]
        return [gather(exchange, logits), *others]

    for logits, *others in run_ranks(2, work, kind):
        assert torch.equal(logits, torch.tensor([[0, 0, 0, 1, 1, 1]] * 2, dtype=torch.bfloat16))
        assert others == ["SGLang's"] * 3


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_all_ranks_take_the_smallest_token(dtype: torch.dtype) -> None:
    def work(exchange: Exchange) -> list[int]:
        tokens = torch.tensor([5, 9] if exchange.share.rank else [7, 8], dtype=dtype)
        with mock.patch.object(group, "exchange", lambda: exchange):
            collectives.smallest_tokens(left_to_sglang, None, tokens, None)
        return [int(token) for token in tokens]

    assert run_ranks(2, work, "memory") == [[5, 8]] * 2


def test_a_single_rank_is_sglangs() -> None:
    coordinator = SimpleNamespace(world_size=1)
    assert collectives.all_gather(left_to_sglang, coordinator, torch.zeros(1, 2), -1) == "SGLang's"
