from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from reference.server.registry_members import Member


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "registry").mkdir()
    return tmp_path / "registry"


@pytest.fixture
def member(tmp_path: Path, root: Path) -> Iterator[Callable[..., Member]]:
    members: list[Member] = []

    def make(name: str, *, starts: bool = True) -> Member:
        members.append(Member(tmp_path / name, str(root)))
        if starts:
            members[-1].start()
        return members[-1]

    yield make
    for each in members:
        if hasattr(each, "replica"):
            each.replica.close()
