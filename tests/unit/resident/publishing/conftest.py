from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from reference.resident.desk import Desk


@pytest.fixture
def make_desk(make_lab: Callable[..., Any], tmp_path: Path) -> Iterator[Callable[..., Desk]]:
    desks: list[Desk] = []

    def make(salt: str = "salt") -> Desk:
        desks.append(Desk(make_lab(), tmp_path / "versions", salt))
        return desks[-1]

    yield make
    for desk in desks:
        desk.publisher.close()
        desk.workers.close()


@pytest.fixture
def desk(make_desk: Callable[..., Desk]) -> Desk:
    return make_desk()
