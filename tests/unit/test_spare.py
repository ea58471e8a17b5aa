"""Freed memory of adapters that is kept for the next one."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace

import pytest

from kt_runtime import spare
from kt_runtime.beside import BATCHES, PIECE_BYTES
from kt_runtime.spare import GIVEN_BACK_BYTES_PER_S, LEAST_SMALL_BYTES, SMALL_BYTES, array, kept_bytes, leaving_bytes

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


class Pace:
    """What the thread that gives memory back sleeps, in seconds: it goes on when it is told to."""

    def __init__(self) -> None:
        self.slept = queue.SimpleQueue[float]()
        self.may_go_on = threading.Semaphore(0)

    def sleep(self, seconds: float) -> None:
        self.slept.put(seconds)
        self.may_go_on.acquire()


@pytest.fixture
def pace(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pace]:
    """While requests are served."""
    wait_until(lambda: not spare._LEAVING)
    pace = Pace()
    monkeypatch.setattr(spare, "time", SimpleNamespace(sleep=pace.sleep))
    monkeypatch.setattr(BATCHES, "are_computed", lambda: True)
    yield pace
    monkeypatch.setattr(BATCHES, "are_computed", lambda: False)
    pace.may_go_on.release(1000)
    wait_until(lambda: not spare._LEAVING)


def memory_is(monkeypatch: pytest.MonkeyPatch, available: int) -> None:
    memory = SimpleNamespace(total=100, available=available)
    monkeypatch.setattr(spare, "psutil", SimpleNamespace(virtual_memory=lambda: memory))


def wait_until(condition: Callable[[], bool]) -> None:
    ticks = threading.Event()
    for _ in range(60_000):
        if condition():
            return
        ticks.wait(0.001)
    raise AssertionError("it did not become true within a minute")


def test_while_requests_are_served_memory_is_given_back_slowly(pace: Pace, monkeypatch: pytest.MonkeyPatch) -> None:
    memory_is(monkeypatch, 25)
    array(2 * PIECE_BYTES + SMALL_BYTES)[:] = 1
    pieces = 2 + SMALL_BYTES // PIECE_BYTES
    for number in range(1, pieces + 1):
        assert pace.slept.get(timeout=60) == PIECE_BYTES / GIVEN_BACK_BYTES_PER_S
        assert leaving_bytes() == (pieces - number) * PIECE_BYTES
        pace.may_go_on.release()


@pytest.mark.parametrize("why", ["nothing is served", "memory is short"])
def test_otherwise_it_is_given_back_at_once(pace: Pace, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    memory_is(monkeypatch, 24 if why == "memory is short" else 100)
    if why == "nothing is served":
        monkeypatch.setattr(BATCHES, "are_computed", lambda: False)
    array(LARGE_BYTES)[:] = 1
    wait_until(lambda: leaving_bytes() == 0)
    assert pace.slept.empty()


def test_memory_of_another_module_is_given_back_slowly_too(pace: Pace, monkeypatch: pytest.MonkeyPatch) -> None:
    memory_is(monkeypatch, 100)
    called = queue.SimpleQueue[int]()

    def part(number: int) -> bool:
        called.put(number)
        return True

    before = array(2 * PIECE_BYTES + SMALL_BYTES)
    del before
    leaving = spare.give_back([partial(part, each) for each in range(3)], 3 << 20)
    for number in range(1, 3 + SMALL_BYTES // PIECE_BYTES):  # what left before
        assert pace.slept.get(timeout=60) == PIECE_BYTES / GIVEN_BACK_BYTES_PER_S and called.empty()
        assert leaving_bytes() == 2 * PIECE_BYTES + SMALL_BYTES - number * PIECE_BYTES + (3 << 20)
        pace.may_go_on.release()
    for number in range(3):
        assert pace.slept.get(timeout=60) == (1 << 20) / GIVEN_BACK_BYTES_PER_S
        assert called.get_nowait() == number and leaving_bytes() == 2 - number << 20 and not leaving.ended.done()
        pace.may_go_on.release()
    assert leaving.ended.result(60) is None and called.empty()


def test_memory_of_another_module_that_is_used_again_is_given_back_no_more() -> None:
    called = []

    def part(number: int) -> bool:
        called.append(number)
        return number < 1

    leaving = spare.give_back([partial(part, each) for each in range(3)], 3 << 20)
    assert leaving.ended.result(60) is None and called == [0, 1]
    wait_until(lambda: leaving_bytes() == 0)


def test_what_is_not_given_back_yet_is_used_again(pace: Pace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it is given back from then on."""
    memory_is(monkeypatch, 100)
    size = SMALL_BYTES + PIECE_BYTES
    first = array(size)
    first[:], place = 7, first.ctypes.data
    del first
    pace.slept.get(timeout=60)
    of_another_size, second = array(size + 1), array(size)
    assert of_another_size.ctypes.data != place and second.ctypes.data == place and leaving_bytes() == 0
    assert not second[:PIECE_BYTES].any() and (second[PIECE_BYTES:] == 7).all()
    second[:] = 8
    assert array(size).ctypes.data != place
    pace.may_go_on.release(2)
    pace.slept.get(timeout=60)  # of the memory that nobody uses
    assert (second == 8).all()
