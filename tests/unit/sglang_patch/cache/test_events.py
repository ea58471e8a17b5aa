"""The cache's tiers when the server ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kt_runtime.sglang_patch.cache import events as cache_events


class Tree:
    """A cache with `num_turns` turns of events until all pages have arrived; None: they never do."""

    def __init__(self, num_turns: int | None) -> None:
        self.ongoing_write_through: dict[int, Any] = {}
        self.ongoing_backup = {1: None}
        self.num_turns = num_turns
        self.calls: list[str] = []

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


def test_without_a_disk_tier_there_is_nothing_to_write() -> None:
    tree = Tree(num_turns=1)
    ending = scheduler(enable_hicache_storage=False, tree_cache=tree)
    cache_events._write_all(ending)
    assert not tree.calls
