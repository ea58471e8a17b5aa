"""A disk tier that is closed after the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from reference.cache.files import FaultyFiles
from reference.cache.tiers import settings

from kt_runtime.cache.disk_tier import DiskTier


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles()


@pytest.fixture
def open_tier(files: FaultyFiles) -> Iterator[Callable[..., DiskTier]]:
    opened: list[DiskTier] = []

    def open_one(**changes: object) -> DiskTier:
        opened.append(DiskTier(settings(**changes), files))
        return opened[-1]

    yield open_one
    for tier in opened:
        tier.close(1.0)
