from __future__ import annotations

from collections.abc import Iterator

import pytest
from reference.ranks import network


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[network.End, network.End]]:
    """The link between two hosts. The test's thread is on host 0, and so are servers that it starts."""
    with network.link() as (here, there), network.within(here.namespace):
        monkeypatch.setenv(network.VARIABLE, here.namespace)
        yield here, there
