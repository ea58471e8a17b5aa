from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Sequence
from typing import Any

import pytest

from kt_runtime.errors import NumericsError
from kt_runtime.resident.pacing.budget import TurnBudget
from kt_runtime.resident.scheduler import (
    MAX_CREDIT_SECONDS,
    PATIENCE_SECONDS,
    Pause,
    Plan,
    Slice,
    Slices,
    TrainingScheduler,
    Work,
)

ALL = Plan(100)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Recorder:
    """Works that write down what they do; `seconds` of the fake clock pass in each slice, or what it is told."""

    def __init__(self, share: float = 0.5, num_ranks: int = 1) -> None:
        self.clock = Clock()
        self.scheduler = TrainingScheduler(share, self.clock, num_ranks=num_ranks)
        self.log: list[str] = []
        self.answers: list[Any] = []
        self.taken: list[float] = []

    def submit(
        self,
        queue: str,
        name: str,
        coming: Sequence[Slice],
        seconds: float | dict[str, float] = 0.0,
        error: Exception | None = None,
    ) -> None:
        """`coming`: what follows the opening, which is called "opening" and runs as slice 0."""

        def passes(kind: str) -> None:
            each = seconds[kind] if isinstance(seconds, dict) else seconds
            self.clock.now += each
            self.taken.append(each)

        def slices() -> Slices:
            passes("opening")
            self.log.append(f"{name}0")
            for index, upcoming in enumerate(coming, start=1):
                yield upcoming
                passes(upcoming.kind)
                self.log.append(f"{name}{index}")
            if error is not None:
                raise error
            return f"{name} done"

        self.scheduler.submit(Work(queue, slices(), self.answers.append, self.answers.append, Slice("opening")))

    def turn(self, is_serving: bool, budget: float) -> float:
        """Runs one turn; returns how long it took."""
        started = self.clock.now
        self.scheduler.run(self.scheduler.plan(is_serving, budget), is_serving)
        return self.clock.now - started


def stays(count: int, kind: str = "layer") -> list[Slice]:
    return [Slice(kind, alike=count - index) for index in range(count)]


SWITCHES = Slice("step", may_switch=True)


def test_works_of_one_session_run_in_order() -> None:
    recorder = Recorder()
    recorder.submit("a", "x", [SWITCHES])
    recorder.submit("a", "y", [])
    assert recorder.scheduler.run(ALL, is_serving=False) == 3
    assert recorder.log == ["x0", "x1", "y0"]
    assert recorder.answers == ["x done", "y done"]
    assert recorder.scheduler.is_idle


def test_sessions_take_turns_where_a_work_may_be_overtaken() -> None:
    recorder = Recorder()
    recorder.submit("a", "x", [Slice("layer"), SWITCHES, Slice("layer")])
    recorder.submit("b", "y", [SWITCHES])
    recorder.scheduler.run(ALL, is_serving=False)
    assert recorder.log == ["x0", "x1", "y0", "x2", "x3", "y1"]


def test_short_slices_run_without_a_plan_and_end_no_other_sessions_microbatch() -> None:
    recorder = Recorder()

    def publishes() -> Slices:
        recorder.log.append("begins")
        yield Pause("key", Slice("result", is_short=True))
        recorder.log.append("ends")

    recorder.submit("a", "x", [Slice("layer"), Slice("layer")])
    recorder.scheduler.run(Plan(1), is_serving=True)  # "a" is in the middle of a microbatch
    answers = recorder.answers.append
    recorder.scheduler.submit(Work("b", publishes(), answers, answers, Slice("opening", is_short=True)))
    recorder.submit("b", "y", [])
    recorder.scheduler.run_short(is_serving=True)
    assert recorder.log == ["x0", "begins"]
    recorder.scheduler.run_short(is_serving=True)
    assert recorder.log == ["x0", "begins"]
    assert recorder.scheduler.resume("key", None)
    recorder.scheduler.run_short(is_serving=True)
    assert recorder.log == ["x0", "begins", "ends"] and recorder.answers == [None]
    recorder.scheduler.run(ALL, is_serving=False)
    assert recorder.log[-3:] == ["x1", "x2", "y0"]


def test_an_error_ends_its_work_and_nothing_else() -> None:
    recorder = Recorder()
    error = NumericsError("the loss is nan")
    recorder.submit("a", "x", [SWITCHES], error=error)
    recorder.submit("a", "y", [])
    recorder.scheduler.run(ALL, is_serving=False)
    assert recorder.answers == [error, "y done"]


def test_what_a_failed_work_had_is_freed_at_once() -> None:
    """Not when the garbage collector comes: a call that failed without memory would leave none for the next batch."""

    class Activations:
        pass

    alive: list[weakref.ref[Activations]] = []

    def slices() -> Slices:
        yield SWITCHES
        activations = Activations()
        alive.append(weakref.ref(activations))
        raise MemoryError("no memory")

    said: list[str] = []
    scheduler = TrainingScheduler(0.5, Clock())
    opening = Slice("opening", 1, may_switch=True)
    scheduler.submit(Work("a", slices(), lambda _: None, lambda error: said.append(str(error)), opening))
    gc.disable()
    try:
        scheduler.run(ALL, is_serving=False)
        assert said == ["no memory"]
        assert [each() for each in alive] == [None]
    finally:
        gc.enable()


def test_nothing_is_planned_without_work() -> None:
    scheduler = Recorder().scheduler
    assert scheduler.plan(is_serving=False, budget=1.0) == Plan()
    assert scheduler.plan(is_serving=False, budget=1.0, arrives=True).num_slices > 0


def test_idle_time_is_filled_up_to_the_budget() -> None:
    recorder = Recorder()
    recorder.submit("a", "x", stays(100), seconds=0.01)
    assert recorder.turn(False, 0.1) == pytest.approx(0.01, abs=5e-14)  # the opening: nothing is known
    assert recorder.turn(False, 0.1) == pytest.approx(0.1, abs=0.011)
    assert recorder.turn(False, 0.001) == pytest.approx(0.01, abs=5e-14)  # longer than the budget


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_long_slice_after_many_short_ones_does_not_lengthen_its_turn(num_ranks: int) -> None:
    """What was seen: 80 slices of 1 ms, then slices of 0.5 s; with a budget of 10 ms one turn took 5 s."""
    recorder = Recorder(num_ranks=num_ranks)
    seconds = {"opening": 0.0001, "short": 0.001, "long": 0.5}
    recorder.submit("a", "x", stays(80, "short") + stays(20, "long"), seconds)
    budget = 0.01
    while not recorder.scheduler.is_idle:
        assert recorder.turn(False, budget) <= budget + 0.5
    assert recorder.taken.count(0.5) == 20


@pytest.mark.parametrize("seed", range(20))
def test_no_turn_takes_longer_than_its_budget_and_one_slice(seed: int) -> None:
    """Whatever the kinds, sizes and times are, and however badly they are announced."""
    chance = random.Random(seed)
    recorder = Recorder()
    for queue in "abc":
        kinds = {kind: chance.choice([1e-5, 1e-3, 0.02, 0.5]) for kind in ("opening", "k0", "k1", "k2")}
        coming = [
            Slice(
                chance.choice(["k0", "k1", "k2"]),
                chance.choice([1, 100, 10_000]),
                chance.randint(1, 50),
                index % 7 == 0,
            )
            for index in range(120)
        ]
        recorder.submit(queue, queue, coming, kinds)
    while not recorder.scheduler.is_idle:
        first = len(recorder.taken)
        took = recorder.turn(False, 0.01)
        assert took <= 0.01 + max(recorder.taken[first:])


def test_several_ranks_run_the_number_that_was_planned() -> None:
    """The number counts what is announced and known, so that it fits; no clock is read while the slices run."""
    recorder = Recorder(num_ranks=2)
    seconds = {"opening": 0.001, "short": 0.001, "long": 0.5}
    recorder.submit("a", "x", stays(30, "short") + stays(2, "long"), seconds)
    planned = []
    while not recorder.scheduler.is_idle:
        plan = recorder.scheduler.plan(False, 0.0105)
        assert plan.seconds is None
        planned.append(plan.num_slices)
        assert recorder.scheduler.run(plan, is_serving=False) == plan.num_slices
    assert planned == [1, 1, 10, 10, 9, 1, 1]


def test_several_ranks_do_not_count_on_a_slice_that_another_session_may_overtake() -> None:
    recorder = Recorder(num_ranks=2)
    step = [Slice("step", alike=5 - index, may_switch=True) for index in range(5)]
    recorder.submit("a", "x", step, 0.001)
    recorder.scheduler.run(Plan(2), is_serving=False)
    assert recorder.scheduler.plan(False, 1.0).num_slices == 4
    recorder.submit("b", "y", [])
    assert recorder.scheduler.plan(False, 1.0).num_slices == 1


@pytest.mark.parametrize("share", [0.2, 0.5, 1.0])
def test_training_keeps_to_its_share_while_serving(share: float) -> None:
    recorder = Recorder(share)
    recorder.submit("a", "x", stays(100_000), seconds=0.003)
    training, serving, step = 0.0, 0.0, 0.011
    for _ in range(500):
        training += recorder.turn(True, 0.01)
        recorder.clock.now += step  # one batch of the engine
        serving += step
    assert training / (training + serving) <= share + 0.01
    assert training / (training + serving) >= min(share, 0.45) * 0.9


def test_a_long_slice_is_paid_back_before_the_next_one() -> None:
    recorder = Recorder(0.25)
    recorder.submit("a", "x", stays(10), seconds=1.0)
    assert recorder.turn(True, 0.01) == 1.0
    recorder.clock.now += 2.9 - MAX_CREDIT_SECONDS
    assert recorder.scheduler.plan(True, 0.01) == Plan()
    recorder.clock.now += 0.2 + MAX_CREDIT_SECONDS
    assert recorder.turn(True, 0.01) == 1.0


def test_idle_training_is_not_paid_back_when_serving_begins() -> None:
    recorder = Recorder(0.1)
    recorder.submit("a", "x", stays(100), seconds=1.0)
    recorder.scheduler.run(Plan(50), is_serving=False)
    assert recorder.scheduler.plan(True, 0.01).num_slices > 0


def test_closing_drops_works_without_an_answer() -> None:
    recorder = Recorder()
    recorder.submit("a", "x", [SWITCHES])
    recorder.submit("b", "y", [])
    recorder.scheduler.run(Plan(1), is_serving=False)
    recorder.scheduler.close()
    assert recorder.scheduler.is_idle
    assert recorder.answers == []


# What waits for something beside the engine.


def pausing(log: list[str], outcome: list[Any]) -> Slices:
    log.append("begins")
    try:
        yield Pause("job", Slice("result"))
    except ValueError as error:
        outcome.append(error)
        raise
    log.append("continues")
    return "done"


def submit_pausing(recorder: Recorder) -> list[Any]:
    seen: list[Any] = []
    work = Work("a", pausing(recorder.log, seen), recorder.answers.append, recorder.answers.append, Slice("opening"))
    recorder.scheduler.submit(work)
    return seen


def test_a_paused_session_waits_and_the_others_continue() -> None:
    recorder = Recorder()
    submit_pausing(recorder)
    recorder.submit("a", "later", [])
    recorder.submit("b", "x", [SWITCHES])
    assert recorder.scheduler.run(ALL, is_serving=False) == 3
    recorder.submit("a", "last", [])
    assert recorder.scheduler.is_idle and recorder.scheduler.plan(False, 0.05) == Plan()
    assert not recorder.scheduler.resume("another job", None)
    assert recorder.scheduler.resume("job", None)
    assert not recorder.scheduler.resume("job", None)
    recorder.scheduler.run(ALL, is_serving=False)
    assert recorder.log == ["begins", "x0", "x1", "continues", "later0", "last0"]
    assert recorder.answers == ["x done", "done", "later done", "last done"]


def test_an_error_is_raised_where_the_work_paused() -> None:
    recorder = Recorder()
    seen, error = submit_pausing(recorder), ValueError("no such file")
    recorder.scheduler.run(ALL, is_serving=False)
    recorder.scheduler.resume("job", error)
    recorder.scheduler.run(ALL, is_serving=False)
    assert recorder.answers == seen == [error] and recorder.scheduler.is_idle


def test_closing_ends_what_is_paused_too() -> None:
    recorder = Recorder()
    submit_pausing(recorder)
    recorder.scheduler.run(ALL, is_serving=False)
    recorder.scheduler.close()
    assert not recorder.scheduler.resume("job", None) and recorder.answers == []


# Cuts.


class Divisible:
    """A work of one kind whose slices of 1024 units can be cut; each unit takes `each` seconds. `sizes`: what ran."""

    def __init__(
        self, recorder: Recorder, each: float, count: int = 10, least: int = 32, overhead: float = 0.0
    ) -> None:
        self.sizes: list[int] = []

        def slices() -> Slices:
            for _ in range(count):
                left = 1024
                while left:
                    granted = yield Slice("whole", left, least=min(left, least), part="part")
                    ran = left if granted is None else granted
                    recorder.clock.now += overhead + each * ran
                    self.sizes.append(ran)
                    left -= ran

        recorder.scheduler.submit(
            Work("a", slices(), recorder.answers.append, recorder.answers.append, Slice("opening"))
        )


def cutting(seconds: float, *, at_least_one: bool = False, most: float = 0.0) -> TurnBudget:
    return TurnBudget(seconds, cuts=True, at_least_one=at_least_one, most=most)


def run_turn(recorder: Recorder, budget: TurnBudget) -> float:
    started = recorder.clock.now
    recorder.scheduler.run(recorder.scheduler.plan(False, budget), is_serving=False)
    return recorder.clock.now - started


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("overhead", [0.0, 0.001])
def test_slices_are_cut_to_the_turns_budget(num_ranks: int, overhead: float) -> None:
    recorder = Recorder(num_ranks=num_ranks)
    work = Divisible(recorder, 1e-4, overhead=overhead)
    while not recorder.scheduler.is_idle:
        assert run_turn(recorder, cutting(0.01)) <= 0.01 + 1e-9
    assert set(work.sizes) <= {32, 64} | set(range(32, 101)) and 64 in work.sizes
    assert sum(work.sizes) == 10 * 1024


def test_the_first_part_without_an_estimate_is_the_least() -> None:
    recorder = Recorder()
    work = Divisible(recorder, 1e-4)
    run_turn(recorder, cutting(1.0))
    run_turn(recorder, cutting(1.0))
    assert work.sizes[0] == 32 and work.sizes[1] > 32


def test_a_larger_budget_makes_larger_parts_and_a_large_one_none() -> None:
    counts = []
    for seconds in (0.005, 0.02, 0.5):
        recorder = Recorder()
        work = Divisible(recorder, 1e-4)
        while not recorder.scheduler.is_idle:
            run_turn(recorder, cutting(seconds))
        counts.append(len(work.sizes))
    assert counts[0] > 2 * counts[1] > 4 * counts[2]


def test_nothing_runs_in_a_turn_whose_budget_the_least_part_exceeds() -> None:
    recorder = Recorder()
    work = Divisible(recorder, 1e-3)
    for _ in range(2):  # the opening and the first part have no estimate: each begins a turn
        run_turn(recorder, cutting(0.01))
    before = len(work.sizes)
    assert before == 1
    for _ in range(10):
        assert run_turn(recorder, cutting(0.01)) == 0.0
    assert len(work.sizes) == before
    assert run_turn(recorder, cutting(0.01, at_least_one=True)) == pytest.approx(
        0.032, abs=3e-14
    )  # 3.5e-15 measured, of a clock at 1


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_part_that_costs_much_more_than_a_larger_one_waits_for_a_longer_turn(num_ranks: int) -> None:
    """A part takes 10 ms and 0.1 ms a unit: 64 units cost 16.4 ms, 512 cost 61.2 ms and not eight times as much."""
    recorder = Recorder(num_ranks=num_ranks)
    work = Divisible(recorder, 1e-4, count=30, overhead=0.01)
    while len(work.sizes) < 15:  # the estimates of all sizes
        run_turn(recorder, cutting(0.08))
    for _ in range(10):
        assert run_turn(recorder, cutting(0.02, most=0.08)) == 0.0
    assert run_turn(recorder, cutting(0.02, most=0.08, at_least_one=True)) > 0.0
    before = len(work.sizes)
    while not recorder.scheduler.is_idle:
        run_turn(recorder, cutting(0.08, most=0.08))
    large = work.sizes[before + 4 :]  # after the rest of a slice
    assert large == [512] * len(large)


def test_a_slice_that_a_later_turn_has_room_for_waits_for_it_but_not_for_ever() -> None:
    recorder = Recorder()
    work = Divisible(recorder, 1e-4, count=100)
    learning = TurnBudget(0.01, cuts=True, longest=1.0)
    for _ in range(30):
        run_turn(recorder, learning)
    assert work.sizes[-3:] == [1024] * 3, "the whole and its parts are known"
    for _ in range(9):
        assert run_turn(recorder, cutting(0.02, most=0.2)) == 0.0
        recorder.clock.now += 0.1 * PATIENCE_SECONDS
    assert run_turn(recorder, cutting(0.15, most=0.2)) == pytest.approx(0.1024, abs=3e-14), "there is room now"
    assert run_turn(recorder, cutting(0.02, most=0.05)) > 0.0, "no later turn has room: it is cut at once"
    for _ in range(3):
        run_turn(recorder, learning)
    assert work.sizes[-1] == 1024
    recorder.clock.now += PATIENCE_SECONDS
    assert 0.0 < run_turn(recorder, cutting(0.02, most=0.2)) <= 0.02, "patience has ended"


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_first_slice_of_a_turn_may_be_longer_than_the_turn(num_ranks: int) -> None:
    """Parts teach what a whole slice takes at most; then each turn runs one."""
    recorder = Recorder(num_ranks=num_ranks)
    work = Divisible(recorder, 1e-4, count=30)
    budget = TurnBudget(0.01, cuts=True, longest=1.0)
    while not recorder.scheduler.is_idle:
        assert run_turn(recorder, budget) <= 0.1024 + 0.01
    assert work.sizes[-15:] == [1024] * 15


def test_without_cuts_a_slice_runs_whole() -> None:
    recorder = Recorder()
    work = Divisible(recorder, 1e-4)
    while not recorder.scheduler.is_idle:
        recorder.turn(False, 0.001)
    assert work.sizes == [1024] * 10


def test_a_whole_call_runs_to_its_end_and_no_further() -> None:
    recorder = Recorder()
    recorder.submit("a", "x", stays(50), seconds=1.0)
    recorder.submit("a", "y", stays(50), seconds=1.0)
    recorder.scheduler.run(recorder.scheduler.plan(True, TurnBudget(float("inf"), whole_call=True)), is_serving=True)
    assert recorder.answers == ["x done"] and len(recorder.log) == 51
    assert recorder.scheduler.plan(True, TurnBudget(float("inf"), whole_call=True)) == Plan()  # it is paid back first


# Weights.


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_sessions_share_by_weight(num_ranks: int) -> None:
    weights = {"a": 3.0, "b": 1.0}
    recorder = Recorder(num_ranks=num_ranks)
    recorder.scheduler = TrainingScheduler(0.5, recorder.clock, num_ranks=num_ranks, weight=lambda name: weights[name])
    for queue in "ab":
        recorder.submit(queue, queue, [SWITCHES] * 200, seconds=0.01)
    recorder.scheduler.run(ALL, is_serving=False)
    assert sum(entry.startswith("a") for entry in recorder.log) == 75


def test_a_session_that_comes_late_does_not_get_the_time_that_it_missed() -> None:
    recorder = Recorder()
    recorder.submit("a", "a", [SWITCHES] * 200, seconds=0.01)
    recorder.scheduler.run(ALL, is_serving=False)
    recorder.submit("b", "b", [SWITCHES] * 200, seconds=0.01)
    recorder.log.clear()
    recorder.scheduler.run(Plan(20), is_serving=False)
    assert sum(entry.startswith("b") for entry in recorder.log) == 10
