"""A disk tier that is closed after the test, and the clock of its patience."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from reference.cache.files import FaultyFiles
from reference.cache.tiers import PlayedClock, settings

from kt_runtime.cache import read_ahead, write_behind
from kt_runtime.cache.disk_tier import DiskTier


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> PlayedClock:
    """Of what the disk's calls take. How often the tier looks after its directory goes by the real one."""
    played = PlayedClock()
    for module in (read_ahead, write_behind):
        monkeypatch.setattr(module, "time", played)
    return played


@pytest.fixture
def open_tier(files: FaultyFiles) -> Iterator[Callable[..., DiskTier]]:
    opened: list[DiskTier] = []

    def open_one(**changes: object) -> DiskTier:
        opened.append(DiskTier(settings(**changes), files))
        return opened[-1]

    yield open_one
    for tier in opened:
        tier.close(1.0)
