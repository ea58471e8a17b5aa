"""Threads that come first, and threads that give way: the numbers that the system holds of them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import pytest

from kt_runtime import priority

GET_ATTRIBUTES = {"x86_64": 315, "aarch64": 275}
LARGER_BYTES = 256


T = TypeVar("T")


class Standing(NamedTuple):
    niceness: int
    slice_ns: int


def standing() -> Standing:
    """This thread's (sched_getattr(2)); slices are 0 on a system that has none of its threads' own."""
    room = ctypes.create_string_buffer(LARGER_BYTES)
    thread = threading.get_native_id()
    assert ctypes.CDLL(None).syscall(GET_ATTRIBUTES[platform.machine()], thread, room, LARGER_BYTES, 0) == 0
    _, _, _, niceness, _, slice_ns, _, _ = priority._ATTRIBUTES.unpack_from(room.raw)
    return Standing(niceness, slice_ns)


def has_slices() -> bool:
    major, minor = (int(each) for each in platform.release().split(".")[:2])
    return platform.machine() in GET_ATTRIBUTES and (major, minor) >= (6, 12)


def in_thread(work: Callable[[], T]) -> T:
    found: list[T] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join(60)
    return found[0]


pytestmark = pytest.mark.skipif(not has_slices(), reason="before Linux 6.12 threads have no slices of their own")


def test_a_thread_that_comes_first_keeps_its_niceness_and_hands_its_slices_on() -> None:
    def work() -> tuple[Standing, Standing]:
        assert priority.come_first(threading.get_native_id())
        return standing(), in_thread(standing)

    before = standing()
    assert in_thread(work) == (Standing(before.niceness, priority.SHORT_SLICE_NS),) * 2
    assert standing() == before


def test_a_thread_that_gives_way_is_nicer_and_has_the_systems_slices_again() -> None:
    before = in_thread(standing)

    def work() -> tuple[Standing, Standing]:
        priority.come_first(threading.get_native_id())
        priority.give_way()
        once = standing()
        priority.give_way()
        return once, standing()

    expected = Standing(min(19, before.niceness + priority.NICENESS), before.slice_ns)
    assert in_thread(work) == (expected, expected)


def test_another_thread_gives_way_by_its_id() -> None:
    begun, done = threading.Event(), threading.Event()
    ids: list[int] = []

    def work() -> Standing:
        ids.append(threading.get_native_id())
        begun.set()
        assert done.wait(60)
        return standing()

    found: list[Standing] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    assert begun.wait(60)
    before = standing()
    priority.give_way(ids[0])
    done.set()
    thread.join(60)
    assert found[0].niceness == min(19, before.niceness + priority.NICENESS) and standing() == before


def test_a_thread_that_is_gone_is_no_error() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        gone = process.pid  # that of its only thread, too; a thread that was joined may still be ending
    assert not priority.come_first(gone)
    priority.give_way(gone)


def test_threads_are_found_by_their_names() -> None:
    code = "import threading; from kt_runtime.priority import threads_by_name; print(sorted(threads_by_name().items()))"
    command = [sys.executable, "-P", "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        said, _ = process.communicate(timeout=60)
    assert f"({process.pid}, " in said
    assert threading.get_native_id() in priority.threads_by_name()
    assert os.getpid() in priority.threads_by_name()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no thread has processors of its own here")
def test_a_thread_is_on_its_processor_in_the_block_only() -> None:
    def work() -> list[set[int]]:
        found = [os.sched_getaffinity(0)]
        with contextlib.suppress(KeyError), priority.on_processor(max(found[0])):
            found.append(os.sched_getaffinity(0))
            raise KeyError
        with priority.on_processor(None):
            found.append(os.sched_getaffinity(0))
        return [*found, os.sched_getaffinity(0)]

    everywhere = os.sched_getaffinity(0)
    assert in_thread(work) == [everywhere, {max(everywhere)}, everywhere, everywhere]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no thread has processors of its own here")
def test_a_processor_that_the_system_refuses_changes_nothing() -> None:
    before = os.sched_getaffinity(0)
    with priority.on_processor(1 << 14):
        assert os.sched_getaffinity(0) == before
    assert os.sched_getaffinity(0) == before


class Played:
    """A thread's clock, and what it has waited for its processor, 3: in played time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.waited = 0.0, 0.0
        self.processors: list[int | None] = []
        self.own = priority.OwnProcessor(3, lambda: self.now, lambda: self.waited)
        monkeypatch.setattr(priority, "on_processor", self._on_processor)

    @contextlib.contextmanager
    def _on_processor(self, processor: int | None) -> Iterator[None]:
        self.processors.append(processor)
        yield

    def is_on_its_own(self, share: float, *, has_work_beside: bool = False) -> bool:
        """In a batch of 10 ms that waits for `share` of it, where it is on its own processor."""
        self.processors.clear()
        with self.own.batch(has_work_beside=has_work_beside):
            self.now += 0.01
            self.waited += 0.01 * share if self.processors else 0.0
        assert self.processors in ([], [3])
        return bool(self.processors)


def test_a_thread_that_often_waits_for_its_processor_has_any_for_some_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(monkeypatch)
    assert all(played.is_on_its_own(0.9 * priority.MOST_WAITED) for _ in range(100))
    found = [played.is_on_its_own(0.6) for _ in range(2 * priority.FREE_BATCHES)]
    first = found.index(False)
    assert first <= priority.AVERAGED
    assert not any(found[first : first + priority.FREE_BATCHES])
    assert found[first + priority.FREE_BATCHES], "it tries again"


def test_beside_threads_that_give_way_a_thread_stays_on_its_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(monkeypatch)
    while played.is_on_its_own(0.9):
        pass
    assert all(played.is_on_its_own(0.9, has_work_beside=True) for _ in range(20))
    assert not played.is_on_its_own(0.9)


def test_a_thread_that_has_to_wait_for_a_processor_knows_for_how_long() -> None:
    """Two threads on one processor, one of which computes for 0.2 s."""
    one = [sys.executable, "-c", "import time; t = time.process_time\nwhile t() < 0.2: pass"]
    processor = max(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else None

    def work() -> tuple[float | None, float | None]:
        queue = priority.RunQueue()
        with priority.on_processor(processor), subprocess.Popen(one) as process:
            before = queue.seconds()
            while process.poll() is None:
                pass
            return before, queue.seconds()

    before, after = in_thread(work)
    if before is None or after is None:
        assert not Path("/proc/thread-self/schedstat").exists()
    else:
        assert after - before > 0.05
