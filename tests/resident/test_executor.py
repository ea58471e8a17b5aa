from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from kt_runtime.errors import NumericsError
from kt_runtime.resident.executor import MAX_CREDIT_SECONDS, Executor, Work


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Recorder:
    """Works that write down what they do; each slice takes `seconds` of the fake clock."""

    def __init__(self, share: float = 0.5) -> None:
        self.clock = Clock()
        self.executor = Executor(share, self.clock)
        self.log: list[str] = []
        self.answers: list[Any] = []

    def submit(
        self, queue: str, name: str, switches: list[bool], seconds: float = 0.0, error: Exception | None = None
    ) -> None:
        def slices() -> Generator[bool, None, str]:
            for index, may_switch in enumerate(switches):
                self.clock.now += seconds
                self.log.append(f"{name}{index}")
                yield may_switch
            if error is not None:
                raise error
            return f"{name} done"

        self.executor.submit(Work(queue, slices(), self.answers.append, self.answers.append))


def test_works_of_one_session_run_in_order() -> None:
    recorder = Recorder()
    recorder.submit("a", "x", [True, True])
    recorder.submit("a", "y", [True])
    assert recorder.executor.run(100, is_serving=False) == 5  # each work's end takes one more
    assert recorder.log == ["x0", "x1", "y0"]
    assert recorder.answers == ["x done", "y done"]
    assert recorder.executor.is_idle


def test_sessions_take_turns_where_a_work_may_be_overtaken() -> None:
    recorder = Recorder()
    recorder.submit("a", "x", [False, True, False, True])
    recorder.submit("b", "y", [True, True])
    recorder.executor.run(100, is_serving=False)
    assert recorder.log == ["x0", "x1", "y0", "x2", "x3", "y1"]


def test_an_error_ends_its_work_and_nothing_else() -> None:
    recorder = Recorder()
    error = NumericsError("the loss is nan")
    recorder.submit("a", "x", [True], error=error)
    recorder.submit("a", "y", [True])
    recorder.executor.run(100, is_serving=False)
    assert recorder.answers == [error, "y done"]


def test_nothing_is_planned_without_work() -> None:
    assert Recorder().executor.plan(is_serving=False, budget_seconds=1.0) == 0


def test_idle_time_is_filled_up_to_the_budget() -> None:
    recorder = Recorder()
    recorder.submit("a", "x", [True] * 100, seconds=0.01)
    assert recorder.executor.plan(False, 0.1) == 1  # nothing is known about slices yet
    recorder.executor.run(1, is_serving=False)
    assert recorder.executor.plan(False, 0.1) in (9, 10)
    assert recorder.executor.plan(False, 0.001) == 1  # a slice longer than the budget runs all the same


@pytest.mark.parametrize("share", [0.2, 0.5, 1.0])
def test_training_keeps_to_its_share_while_serving(share: float) -> None:
    recorder = Recorder(share)
    recorder.submit("a", "x", [True] * 100_000, seconds=0.003)
    training, serving, step = 0.0, 0.0, 0.011
    for _ in range(500):
        before = recorder.clock.now
        recorder.executor.run(recorder.executor.plan(True, 0.01), is_serving=True)
        training += recorder.clock.now - before
        recorder.clock.now += step  # one batch of the engine
        serving += step
    assert training / (training + serving) <= share + 0.01
    assert training / (training + serving) >= min(share, 0.45) * 0.9


def test_a_long_slice_is_paid_back_before_the_next_one() -> None:
    recorder = Recorder(0.25)
    recorder.submit("a", "x", [True] * 10, seconds=1.0)
    recorder.executor.run(recorder.executor.plan(True, 0.01), is_serving=True)
    recorder.clock.now += 2.9 - MAX_CREDIT_SECONDS
    assert recorder.executor.plan(True, 0.01) == 0
    recorder.clock.now += 0.2 + MAX_CREDIT_SECONDS
    assert recorder.executor.plan(True, 0.01) == 1


def test_idle_training_is_not_paid_back_when_serving_begins() -> None:
    recorder = Recorder(0.1)
    recorder.submit("a", "x", [True] * 100, seconds=1.0)
    recorder.executor.run(50, is_serving=False)
    assert recorder.executor.plan(True, 0.01) == 1


def test_closing_drops_works_without_an_answer() -> None:
    recorder = Recorder()
    recorder.submit("a", "x", [True, True])
    recorder.submit("b", "y", [True])
    recorder.executor.run(1, is_serving=False)
    recorder.executor.close()
    assert recorder.executor.is_idle
    assert recorder.answers == []
