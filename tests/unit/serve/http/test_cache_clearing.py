from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kt_runtime.errors import ConflictError, RequestTimeoutError
from kt_runtime.serve.http import cache_clearing
from kt_runtime.serve.http.cache_clearing import CacheClearing


class Engine:
    """Device and disk hold pages; the disk's go `delay` looks after they were told to, and `new` ones come."""

    def __init__(self, disk_pages: int | None = 5, *, is_busy: bool = False, delay: int = 0, new: int = 0) -> None:
        self.device_pages, self.disk_pages, self.is_busy, self.delay, self.new = 3, disk_pages, is_busy, delay, new
        self.cleared, self.is_asked = 0, False
        self.disk: dict[str, Any] = {"read_only": False, "reading_stopped": None, "writing_stopped": None}

    async def flush_memory_tiers(self, wait_s: float) -> bool:
        self.device_pages = self.device_pages if self.is_busy else 0
        return not self.is_busy

    async def clear_disk_tier(self) -> None:
        self.is_asked = True

    async def status(self) -> dict[str, Any]:
        if self.is_asked and self.disk_pages is not None:
            self.delay -= 1
            if self.delay < 0:
                self.cleared += self.disk_pages
                self.disk_pages, self.is_asked = self.new, False
        tiers: list[dict[str, Any]] = [{"tier": "device", "pages": self.device_pages}]
        if self.disk_pages is not None:
            counters = {"cleared": self.cleared}
            tiers.append(
                {"tier": "disk", "pages": self.disk_pages, "directory": "/c", "counters": counters, **self.disk}
            )
        return {"cache": tiers}


def clear(engine: Engine) -> dict[str, Any]:
    return asyncio.run(CacheClearing(engine.status, engine).clear())


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_clearing, "POLL_SECONDS", 0.001)
    monkeypatch.setattr(cache_clearing, "DISK_SECONDS", 0.2)


def test_all_tiers_are_emptied_also_when_the_disk_takes_a_while() -> None:
    engine = Engine(delay=3)
    assert clear(engine) == {"cleared": {"device": 3, "disk": 5}}
    assert (engine.device_pages, engine.disk_pages) == (0, 0)


def test_pages_that_requests_write_meanwhile_are_no_failure() -> None:
    assert clear(Engine(new=2)) == {"cleared": {"device": 3, "disk": 5}}


def test_the_disks_of_all_ranks_are_waited_for() -> None:
    engine, asked = Engine(), 0

    async def status() -> dict[str, Any]:
        nonlocal asked
        asked += engine.cleared > 0
        other = {"tier": "disk", "pages": 4, "directory": "/c/1", "writing_stopped": None}
        other["counters"] = {"cleared": 4 if asked > 3 else 0}
        found = await engine.status()
        disk = next(tier for tier in found["cache"] if tier["tier"] == "disk")
        return {**found, "ranks": [{"rank": 0, "disk": disk}, {"rank": 1, "disk": other}]}

    assert asyncio.run(CacheClearing(status, engine).clear()) == {"cleared": {"device": 3, "disk": 5}}
    assert asked == 4


def test_a_server_without_a_disk_tier_is_emptied() -> None:
    assert clear(Engine(disk_pages=None)) == {"cleared": {"device": 3}}


def test_a_busy_server_keeps_everything() -> None:
    engine = Engine(is_busy=True)
    with pytest.raises(ConflictError, match="requests were in progress"):
        clear(engine)
    assert (engine.device_pages, engine.disk_pages) == (3, 5)


@pytest.mark.parametrize(("field", "value"), [("read_only", True), ("reading_stopped", "the directory was removed")])
def test_a_disk_that_is_out_of_reach_is_said_before_anything_is_changed(field: str, value: Any) -> None:
    engine = Engine()
    engine.disk[field] = value
    with pytest.raises(ConflictError, match=r"only reads it|directory was removed"):
        clear(engine)
    assert engine.device_pages == 3


def test_a_full_disk_is_emptied() -> None:
    engine = Engine()
    engine.disk["writing_stopped"] = "No space left on device"
    assert clear(engine) == {"cleared": {"device": 3, "disk": 5}}


def test_a_disk_that_never_answers_is_given_up() -> None:
    with pytest.raises(RequestTimeoutError, match="still holds 5 records"):
        clear(Engine(delay=10**9))
