"""The scheduler's thread while pages move, and when the server ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kt_runtime.sglang_patch import turns
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


def scheduler(**changes: Any) -> tuple[Any, list[float]]:
    """With the milliseconds of its rests."""
    rests: list[float] = []
    fields = {
        "enable_hierarchical_cache": True,
        "enable_hicache_storage": True,
        "is_fully_idle": lambda: False,
        "idle_sleeper": SimpleNamespace(poller=SimpleNamespace(poll=rests.append)),
    }
    return SimpleNamespace(**(fields | changes)), rests


def test_it_rests_while_pages_move() -> None:
    waiting, rests = scheduler()
    cache_events._rest(None, waiting)
    assert rests == [1.0]


@pytest.mark.parametrize("changes", [{"enable_hierarchical_cache": False}, {"is_fully_idle": lambda: True}])
def test_it_does_not_rest_without_tiers_nor_after_its_sleep(changes: dict[str, Any]) -> None:
    other, rests = scheduler(**changes)
    cache_events._rest(None, other)
    assert not rests


def test_it_does_not_rest_while_there_is_training_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_resident", SimpleNamespace(has_work=lambda: True))
    waiting, rests = scheduler()
    cache_events._rest(None, waiting)
    assert not rests


def test_what_was_computed_reaches_the_tier_before_it_is_closed() -> None:
    tree = Tree(num_turns=3)
    ending, _ = scheduler(tree_cache=tree)
    cache_events._write_all(ending)
    assert tree.calls == ["events"] * 3 + ["shutdown"]


def test_pages_that_do_not_arrive_are_given_up(caplog: pytest.LogCaptureFixture) -> None:
    assert not cache_events.finish_copies(Tree(num_turns=None), timeout_s=0.02)
    assert len(caplog.records) == 1


def test_without_a_disk_tier_there_is_nothing_to_write() -> None:
    tree = Tree(num_turns=1)
    ending, _ = scheduler(enable_hicache_storage=False, tree_cache=tree)
    cache_events._write_all(ending)
    assert not tree.calls
