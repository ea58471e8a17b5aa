from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from kt_runtime.errors import InvalidValueError, RequestTimeoutError, RuntimeFault
from kt_runtime.resident.workers import STALL_SECONDS, Workers

PATIENCE_SECONDS = 60.0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """Workers with a clock in the test's hand, and pipes that nobody writes to: whoever opens one is blocked."""

    def __init__(self, root: Path, **bounds: int) -> None:
        self.root, self.clock = root, Clock()
        self.ended: queue.Queue[tuple[str, Exception | None]] = queue.Queue()
        self.workers = Workers(
            "test", lambda *ended: self.ended.put(ended), patience_s=PATIENCE_SECONDS, clock=self.clock, **bounds
        )
        self.blocked: list[Path] = []

    def block(self, key: str) -> Path:
        """Begins to read a file of a file system that does not answer."""
        pipe = self.root / key
        os.mkfifo(pipe)
        self.blocked.append(pipe)
        self.workers.begin(key, str(pipe), pipe.read_text)
        return pipe

    def answer(self, pipe: Path) -> None:
        """The file system is back. Somebody must be reading."""
        self.blocked.remove(pipe)
        pipe.write_text("late")

    def pass_time(self, seconds: float, until: Callable[[], bool]) -> None:
        """So often that threads that are just going to sleep have done so."""
        deadline = time.monotonic() + 120
        while not until():
            assert time.monotonic() < deadline
            self.clock.now += seconds
            self.workers.look()
            time.sleep(0.005)

    def next_ended(self) -> tuple[str, Exception | None]:
        return self.ended.get(timeout=30)

    @property
    def num_running(self) -> int:
        return len(self.workers._running)


@pytest.fixture
def make_bench(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def make(**bounds: int) -> Bench:
        benches.append(Bench(tmp_path, **bounds))
        return benches[-1]

    yield make
    for bench in benches:
        bench.workers.close()
        for pipe in bench.blocked:  # those that were begun; the others are never opened
            try:
                os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
            except OSError:
                continue
        assert bench.workers.finish(30)


def test_results_and_errors_are_taken_once_they_are_told(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    bench.workers.begin("a", "adapter 'a'", lambda: 7)
    assert bench.next_ended() == ("a", None)
    assert bench.workers.take("a") == 7

    def fails() -> None:
        raise InvalidValueError("no")

    bench.workers.begin("b", "adapter 'b'", fails)
    key, error = bench.next_ended()
    assert key == "b" and isinstance(error, InvalidValueError)
    with pytest.raises(InvalidValueError, match="no"):
        bench.workers.take("b")


def test_so_many_run_at_once_and_the_others_wait_for_them(make_bench: Callable[..., Bench]) -> None:
    bench, gates, most, lock = make_bench(num_threads=2), threading.Event(), [0, 0], threading.Lock()
    both = threading.Event()

    def work() -> None:
        with lock:
            most[0] += 1
            most[1] = max(most)
            if most[0] == 2:
                both.set()
        assert gates.wait(30)
        with lock:
            most[0] -= 1

    for key in "abcdef":
        bench.workers.begin(key, key, work)
    assert both.wait(30)
    gates.set()
    assert {bench.next_ended()[0] for _ in range(6)} == set("abcdef")
    assert most == [0, 2]


def test_two_places_that_hang_hold_up_nobody_else_and_are_told_when_patience_ends(
    make_bench: Callable[..., Bench],
) -> None:
    bench = make_bench(num_threads=2)
    pipes = [bench.block("one"), bench.block("two")]
    bench.workers.begin("bob", "adapter 'bob'", lambda: "read")
    assert bench.ended.empty()
    bench.pass_time(STALL_SECONDS, until=lambda: not bench.ended.empty())
    assert bench.next_ended() == ("bob", None)
    assert bench.workers.take("bob") == "read"
    bench.pass_time(STALL_SECONDS, until=lambda: bench.ended.qsize() == 2)
    for _ in range(2):
        key, error = bench.next_ended()
        assert isinstance(error, RequestTimeoutError)
        assert f"{bench.root}/{key}: the file system has not answered for 60 s" in str(error)
        with pytest.raises(RequestTimeoutError):
            bench.workers.take(key)
    for pipe in pipes:
        bench.answer(pipe)
    assert bench.workers.finish(30) and bench.ended.empty()  # what came late is dropped


def test_lost_threads_are_bounded_and_come_back(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(num_threads=1, max_threads=3)
    pipes = [bench.block(key) for key in ("one", "two", "three")]
    bench.pass_time(STALL_SECONDS, until=lambda: bench.num_running == 3)
    bench.workers.begin("bob", "adapter 'bob'", lambda: "read")
    bench.pass_time(PATIENCE_SECONDS, until=lambda: bench.ended.qsize() == 4)
    errors = dict(bench.next_ended() for _ in range(4))
    assert "adapter 'bob': not begun: 3 threads wait for file systems that do not answer" in str(errors["bob"])
    assert all(str(pipe) in str(errors["bob"]) for pipe in pipes)
    assert bench.num_running == 3
    bench.answer(pipes[0])
    bench.pass_time(0.0, until=lambda: bench.num_running == 2)
    bench.workers.begin("alice", "adapter 'alice'", lambda: "read")
    assert bench.next_ended() == ("alice", None)


def used_more_than(job: Any, cpu_seconds: float) -> Callable[[], bool]:
    return lambda: job.cpu_seconds > cpu_seconds


def test_a_thread_that_works_for_long_is_not_one_that_hangs(make_bench: Callable[..., Bench]) -> None:
    bench, stop = make_bench(num_threads=1), threading.Event()

    def works() -> str:
        while not stop.is_set():
            sum(range(1000))
        return "done"

    bench.workers.begin("slow", "a large adapter", works)
    job = bench.workers._jobs["slow"]
    for _ in range(10):
        bench.pass_time(0.0, until=used_more_than(job, job.cpu_seconds))  # a busy machine lets it wait
        bench.clock.now += PATIENCE_SECONDS / 2
        bench.workers.look()
    assert bench.ended.empty()
    stop.set()
    assert bench.next_ended() == ("slow", None)
    assert bench.workers.take("slow") == "done"


def test_what_is_given_up_is_not_told(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(num_threads=1)
    pipe = bench.block("one")
    bench.workers.begin("waits", "waits", lambda: None)
    for key in ("one", "waits", "never heard of"):
        bench.workers.give_up(key)
    bench.answer(pipe)
    assert bench.workers.finish(30) and bench.ended.empty()


def test_after_the_end_nothing_begins(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(num_threads=1)
    pipe, begun = bench.block("one"), []
    bench.workers.begin("waits", "waits", lambda: begun.append(1))
    bench.workers.close()
    bench.workers.begin("late", "late", lambda: begun.append(2))
    with pytest.raises(RuntimeFault, match="late: the server is shutting down"):
        bench.workers.take("late")
    bench.answer(pipe)
    assert bench.next_ended() == ("one", None) and not begun


def test_a_fault_of_ours_is_logged_where_it_happened(
    make_bench: Callable[..., Bench], caplog: pytest.LogCaptureFixture
) -> None:
    bench = make_bench()

    def broken() -> Any:
        return 1 / 0

    bench.workers.begin("a", "adapter 'a'", broken)
    assert isinstance(bench.next_ended()[1], ZeroDivisionError)
    assert "adapter 'a': unexpected error" in caplog.text and "in broken" in caplog.text


def test_a_result_may_be_waited_for_before_it_is_there(make_bench: Callable[..., Bench]) -> None:
    """As on a rank that is slower than rank 0."""
    bench, asked = make_bench(), threading.Event()

    class Asked(Future[Any]):
        def result(self, timeout: float | None = None) -> Any:
            asked.set()
            return super().result(30)

    bench.workers.begin("a", "a", lambda: asked.wait(30))
    bench.workers._jobs["a"].result = Asked()
    assert bench.workers.take("a") is True
    assert bench.workers._jobs == {}
