"""Freed memory of adapters that is kept for the next one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kt_runtime import spare
from kt_runtime.spare import LEAST_SMALL_BYTES, SMALL_BYTES, array, kept_bytes

LARGE_BYTES = SMALL_BYTES + 1


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    spare.free()
    yield
    spare.free()


@pytest.mark.parametrize("num_bytes", [LEAST_SMALL_BYTES, SMALL_BYTES, LARGE_BYTES])
def test_freed_memory_is_used_again_only_after_its_last_view(num_bytes: int) -> None:
    spare.keep()
    first = array(num_bytes)
    view, place = first[100:200], first.ctypes.data
    del first
    assert kept_bytes() == 0
    view[:] = 7
    second = array(num_bytes)
    second[:] = 0
    assert (view == 7).all()
    del view
    assert kept_bytes() == num_bytes
    assert array(num_bytes + 1).ctypes.data != place
    assert array(num_bytes).ctypes.data == place


@pytest.mark.parametrize(
    ("num_bytes", "is_kept"),
    [(1, False), (LEAST_SMALL_BYTES - 1, False), (LEAST_SMALL_BYTES, True), (SMALL_BYTES, True), (LARGE_BYTES, False)],
)
def test_only_small_memory_is_kept_before_one_asks_for_more(num_bytes: int, is_kept: bool) -> None:
    array(num_bytes)
    assert kept_bytes() == num_bytes * is_kept
    spare.free()
    assert kept_bytes() == 0
    spare.keep()
    array(num_bytes)
    assert kept_bytes() == num_bytes
    spare.free()
    assert kept_bytes() == 0
    array(LARGE_BYTES)
    assert kept_bytes() == 0


@pytest.mark.parametrize(("name", "is_large"), [("MOST_BYTES", True), ("MOST_SMALL_BYTES", False)])
def test_the_oldest_make_room_beyond_the_bound(monkeypatch: pytest.MonkeyPatch, name: str, is_large: bool) -> None:
    monkeypatch.setattr(spare, name, 2 * SMALL_BYTES)
    if is_large:
        spare.keep()
    arrays = [array(SMALL_BYTES - number) for number in range(3)]
    while arrays:
        del arrays[0]
    assert kept_bytes() == 2 * SMALL_BYTES - 3
