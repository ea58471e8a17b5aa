"""The cache's tiers when the server ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kt_runtime.sglang_patch.cache import events as cache_events


class Tree:
    """A cache with `num_turns` turns of events until all pages have arrived; None: they never do. `of_others`: what
    another rank has to say in each sum over the ranks: (copies on their way, whether its time is over)."""

    def __init__(self, num_turns: int | None, of_others: list[tuple[int, int]] | None = None) -> None:
        self.of_others = of_others or []
        self.ongoing_write_through: dict[int, Any] = {}
        self.ongoing_backup = {1: None}
        self.num_turns = num_turns
        self.calls: list[str] = []

    def _all_reduce(self, data: torch.Tensor, op: Any) -> None:
        assert op == torch.distributed.ReduceOp.MAX
        if self.of_others:
            data.copy_(torch.maximum(data, torch.tensor(self.of_others.pop(0), dtype=data.dtype)))

    def check_hicache_events(self) -> None:
        self.calls.append("events")
        if self.calls.count("events") == self.num_turns:
            self.ongoing_backup.clear()

    def shutdown(self) -> None:
        self.calls.append("shutdown")


def scheduler(**changes: Any) -> Any:
    return SimpleNamespace(**({"enable_hicache_storage": True} | changes))


def test_what_was_computed_reaches_the_tier_before_it_is_closed() -> None:
    tree = Tree(num_turns=3)
    ending = scheduler(tree_cache=tree)
    cache_events._write_all(ending)
    assert tree.calls == ["events"] * 3 + ["shutdown"]


def test_pages_that_do_not_arrive_are_given_up(caplog: pytest.LogCaptureFixture) -> None:
    assert not cache_events.finish_copies(Tree(num_turns=None), timeout_s=0.02)
    assert len(caplog.records) == 1


def test_all_ranks_look_equally_often_for_what_one_of_them_still_copies() -> None:
    tree = Tree(num_turns=1, of_others=[(2, 0), (2, 0), (1, 0), (0, 0)])
    assert cache_events.finish_copies(tree, timeout_s=60.0)
    assert tree.calls == ["events"] * 3


def test_all_ranks_give_up_when_one_of_them_does() -> None:
    tree = Tree(num_turns=None, of_others=[(1, 0), (1, 1)])
    assert not cache_events.finish_copies(tree, timeout_s=60.0)
    assert tree.calls == ["events"]


def test_without_a_disk_tier_there_is_nothing_to_write() -> None:
    tree = Tree(num_turns=1)
    ending = scheduler(enable_hicache_storage=False, tree_cache=tree)
    cache_events._write_all(ending)
    assert not tree.calls
