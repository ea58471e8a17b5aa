"""Decides which session's slice runs next, and whether training may run now.

A `Work` is a generator of slices. It yields a description (`Slice`) of its *next* slice; each `next` runs the slice
that was announced last. The code up to the first yield is the slice `opening`. A session's works run in order of
submission. Sessions alternate only before a slice with `may_switch`: in the middle of a microbatch, a session holds
activations.

**End of a turn.** A turn has a budget of seconds (`pacing/budget.py`). The scheduler estimates a slice's duration per
kind and size, from earlier slices of that kind.

- One rank: the scheduler reads the clock after each slice. The turn ends if the next slice is not expected to fit into
  the rest of the budget, or if it has no estimate yet: such a slice starts a new turn. So a turn takes at most the
  budget plus one slice, however wrong the estimates are.
- Several ranks: all ranks must run the same slices, so no rank may stop by its own clock. Rank 0 decides the number of
  slices before the turn and broadcasts it. It counts announced slices only: of the run of alike slices at the head of
  the queue, as many as fit by their estimate, or one without an estimate.

**Cuts.** Where the budget says so, a slice that does not fit is cut, if it can be: it announces the `least` part that
it can run, and gets as many units of its size as fit. The part's result does not depend on where it was cut. A part
without an estimate is the least one. Parts together cost more than the whole, and a small one more per unit than a
large one. So if the whole slice may fit a later turn, it waits for that turn, but no longer than `PATIENCE_SECONDS`
after training's last slice. A part that costs more per unit than `WASTE` allows waits for a longer turn, too.

**Several sessions** share training's time by weight: where the session may change, the next is the one that has had
the least time for its weight. With several ranks, whose clocks differ, the changes are counted instead of the time.

**Short slices** run in the turn in which they are announced, outside the budget: publishing begins and ends with one.

**Pauses.** A work that waits for a worker thread (such as a file read) yields a `Pause`. Its session's works then stop,
while other sessions continue, until `resume` is called with the pause's key.

The scheduler does not know what a slice computes. Not thread-safe: it runs on the engine's thread.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import msgspec

from kt_runtime.resident.pacing.budget import TurnBudget
from kt_runtime.resident.pacing.estimates import Estimates
from kt_runtime.resident.pacing.latencies import ShareOfTime

UNBOUNDED_SLICES = 1 << 30
MAX_CREDIT_SECONDS = 0.05
"""Upper bound on unused training time that is carried over, so that no long burst follows an idle phase of training."""

WHOLE_OF_PARTS = 4.5
"""Upper estimate of a whole slice's time over that of its parts of the first kind: a layer backward takes 3.5 times its
attention forward with AMX, and 4.5 times with AVX-512. A slice that is never tried whole stays in parts, which take
longer in total."""

WASTE = 1.05
"""Highest allowed cost per unit of a part, relative to the largest part that fits any turn."""

PATIENCE_SECONDS = 1.0

MOST_REMEMBERED = 1024
"""Number of sessions without work whose time is remembered."""


class Slice(NamedTuple):
    """Describes a work's next slice. `kind`: slices of one kind run the same operation on different data.

    `size`: the slice's time grows with this number, in the kind's own unit (tokens of a layer, elements of an optimizer
    step). `alike`: the known number of consecutive slices of this kind and size, this one included. `may_switch`:
    another session may run before this slice.

    `least`: a part of the slice may run in its place, with this number of units of `size` or a multiple; 0: no part
    may. The part is of kind `part`. The work is sent the number of units, None for the whole slice.

    `is_short`: it takes a few milliseconds, whatever its data. It needs no plan (`TrainingScheduler.run_short`).
    """

    kind: str
    size: int = 1
    alike: int = 1
    may_switch: bool = False
    least: int = 0
    part: str = ""
    is_short: bool = False


class Pause(NamedTuple):
    """The work's next slice, `then`, does not run before `TrainingScheduler.resume(key)`."""

    key: str
    then: Slice


Slices = Generator[Slice | Pause, int | None, Any]
"""Yields the description of each slice but the first, before it runs, and is sent how much of it to run. Returns the
work's result."""


def run_at_once(slices: Generator[Slice | Pause, None, Any]) -> Any:
    """Runs all slices, without a scheduler and without a pause; returns the work's result."""
    while True:
        try:
            next(slices)
        except StopIteration as stop:
            return stop.value


@dataclass
class Work:
    """`queue`: the session (or other name) whose works run in order. Exactly one of `done`, `failed` is called, once.

    `opening`: describes the part of `slices` before the first yield.
    """

    queue: str
    slices: Slices
    done: Callable[[Any], None]
    failed: Callable[[Exception], None]
    opening: Slice


class Plan(msgspec.Struct, frozen=True, array_like=True):
    """The bounds of one turn. `seconds`: the turn's time budget; None: only `num_slices` ends the turn.

    `cuts`, `at_least_one`, `whole_call`, `longest`, `most`: as of `TurnBudget`. `granted`: how much of the first slice
    runs, in units of its size; None: all of it.
    """

    num_slices: int = 0
    seconds: float | None = None
    cuts: bool = False
    at_least_one: bool = True
    whole_call: bool = False
    granted: int | None = None
    longest: float = 0.0
    most: float = 0.0


class _Queue:
    """A session's works. `upcoming`: the next slice of the first work. `waits_for`: the key of this work's pause.

    `error`: raised in the paused work when it resumes, in place of its next slice.
    """

    def __init__(self) -> None:
        self.works: deque[Work] = deque()
        self.upcoming: Slice | None = None
        self.waits_for: str | None = None
        self.error: Exception | None = None

    @property
    def next_slice(self) -> Slice:
        return self.upcoming or self.works[0].opening

    def advance(self, granted: int | None) -> None:
        """Runs the next slice, or `granted` units of it. Raises StopIteration at the work's end."""
        slices = self.works[0].slices
        error, self.error = self.error, None
        announced = slices.send(granted) if error is None else slices.throw(error)
        if isinstance(announced, Pause):
            self.waits_for, self.upcoming = announced
        else:
            self.upcoming = announced


class Turns:
    """Sessions' time divided by their weights, since they first had work. `weight`: gives a session's weight."""

    def __init__(self, weight: Callable[[str], float]) -> None:
        self._weight = weight
        self._used: OrderedDict[str, float] = OrderedDict()
        self._now = 0.0

    def begin(self, name: str) -> None:
        """The session has work again. Time in which it had none gives it no credit."""
        self._used[name] = max(self._used.pop(name, 0.0), self._now)
        while len(self._used) > MOST_REMEMBERED:
            self._used.popitem(last=False)

    def add(self, name: str, amount: float) -> None:
        self._used[name] = self._used.get(name, self._now) + amount / self._weight(name)

    def next_of(self, names: OrderedDict[str, _Queue]) -> str:
        """The session with the least time, the first of several."""
        chosen = min(names, key=lambda name: self._used.get(name, self._now))
        self._now = max(self._now, self._used.get(chosen, 0.0))
        return chosen


class TrainingScheduler:
    """`training_share`: the largest share of the time, in (0, 1], that slices may take while requests are served.

    While serving, a slice of d seconds is followed by d * (1 / share - 1) seconds for serving before the next slice.
    `clock`: monotonic seconds. `num_ranks`: number of processes that run the same slices. `weight`: of a session.
    """

    def __init__(
        self,
        training_share: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        num_ranks: int = 1,
        weight: Callable[[str], float] = lambda session: 1.0,
    ) -> None:
        self.training_share = training_share
        self._clock, self._num_ranks = clock, num_ranks
        self._queues: OrderedDict[str, _Queue] = OrderedDict()
        self._paused: dict[str, _Queue] = {}
        self._turns = Turns(weight)
        self._not_before = self._last_ended = clock()
        self._estimate = Estimates()
        self.share_of_time = ShareOfTime(clock)
        self.slices_run = self.parts_run = self.calls_ended = 0

    @property
    def is_idle(self) -> bool:
        """No slice can run now; paused works may exist."""
        return not self._queues

    def submit(self, work: Work) -> None:
        queue = self._paused.get(work.queue) or self._queues.get(work.queue)
        if queue is None:
            queue = self._queues[work.queue] = _Queue()
            self._turns.begin(work.queue)
        queue.works.append(work)

    def num_works(self, name: str) -> int:
        """Number of works of one session, the running one included."""
        queue = self._paused.get(name) or self._queues.get(name)
        return len(queue.works) if queue is not None else 0

    def resume(self, key: str, error: Exception | None) -> bool:
        """Resumes the work that paused with `key`, or raises `error` in it. False if no work waits for `key`."""
        for name, queue in self._paused.items():
            if queue.waits_for == key:
                queue.waits_for, queue.error = None, error
                self._queues[name] = self._paused.pop(name)
                return True
        return False

    def plan(self, is_serving: bool, budget: float | TurnBudget, *, arrives: bool = False) -> Plan:
        """The plan of the turn that begins now: the slices that fit into the budget and the share.

        The plan is empty without work, or while training owes time to serving. `budget`: seconds, of which at least one
        slice gets some, however long it is. `arrives`: work will be submitted before the turn. The plan can be
        broadcast to other ranks.
        """
        if not isinstance(budget, TurnBudget):
            budget = TurnBudget(budget)
        if not self._queues and not (arrives and not is_serving):
            return Plan()
        seconds = budget.seconds
        if is_serving:
            free = (self._clock() - self._not_before) * self.training_share
            if free < 0:
                return Plan()
            if self.training_share < 1 and not budget.whole_call:
                seconds = min(seconds, free / (1 - self.training_share))  # slices earn their own share
        if seconds <= 0 and not budget.at_least_one:
            return Plan()
        if self._num_ranks == 1:
            limit = None if budget.whole_call else seconds
            return Plan(
                UNBOUNDED_SLICES,
                limit,
                budget.cuts,
                budget.at_least_one,
                budget.whole_call,
                longest=budget.longest,
                most=budget.most,
            )
        return self._counted(seconds, budget)

    def _counted(self, seconds: float, budget: TurnBudget) -> Plan:
        """A plan without a clock, for several ranks."""
        if budget.whole_call:
            return Plan(UNBOUNDED_SLICES, whole_call=True)
        if not self._queues:
            return Plan(1)
        upcoming = next(iter(self._queues.values())).next_slice
        longest = max(seconds, budget.longest)
        granted = self._granted(upcoming, longest, budget, is_first=True)
        if granted == 0:
            return Plan()
        if granted is not None:
            return Plan(1, granted=granted)
        each = self._estimate(upcoming.kind, upcoming.size)
        if math.isinf(each) or (upcoming.may_switch and len(self._queues) > 1):
            return Plan(1)
        return Plan(max(1, min(upcoming.alike, int(seconds / each) if each > 0 else upcoming.alike)))

    def run(self, plan: Plan, is_serving: bool) -> int:
        """Runs the slices of one turn; returns their number, which is smaller if the work ends early."""
        ends = math.inf if plan.seconds is None else self._clock() + plan.seconds
        count, calls = 0, self.calls_ended
        while count < plan.num_slices and self._queues and not (plan.whole_call and self.calls_ended > calls):
            granted = plan.granted
            if not math.isinf(ends):
                upcoming = next(iter(self._queues.values())).next_slice
                left = max(ends - self._clock(), 0.0 if count else plan.longest)
                granted = self._granted(upcoming, left, plan, is_first=not count)
            if granted == 0:
                break
            self.run_slice(is_serving, granted)
            count += 1
        return count

    def run_short(self, is_serving: bool) -> None:
        """Runs the short slices that are next in their sessions. Called every turn, whatever the plan: a slice that
        waited for a plan would wait for another batch of the engine."""
        for name in list(self._queues):
            while name in self._queues and self._queues[name].next_slice.is_short:
                self._run_slice_of(name, is_serving, None)

    def _granted(self, upcoming: Slice, seconds: float, turn: Plan | TurnBudget, *, is_first: bool) -> int | None:
        """How many units of the slice's size run now: None: all of them, 0: none."""
        if not turn.cuts:
            expected = self._estimate(upcoming.kind, upcoming.size)
            known = self._estimate.knows(upcoming.kind, upcoming.size)
            return None if is_first or (known and expected <= seconds) else 0
        if self._estimate.knows(upcoming.kind, upcoming.size):
            if self._estimate(upcoming.kind, upcoming.size) <= seconds:
                return None
            if self._has_patience(upcoming, turn.most):
                return 0
        elif is_first and (not upcoming.least or self._may_be_tried(upcoming, seconds)):
            return None
        largest = self._largest_part(upcoming, seconds)
        if largest:
            waits = self._is_wasteful(upcoming, largest, turn.most) and not (is_first and turn.at_least_one)
            return 0 if waits else largest
        unknown = bool(upcoming.least) and math.isinf(self._estimate(upcoming.part, upcoming.least))
        if is_first and (turn.at_least_one or unknown):
            return min(upcoming.least, upcoming.size) or None
        return 0

    def _has_patience(self, upcoming: Slice, most: float) -> bool:
        """Whether a slice that does not fit now may run whole in a later turn."""
        if not upcoming.least or self._num_ranks > 1 or self._clock() - self._last_ended >= PATIENCE_SECONDS:
            return False
        return self._estimate(upcoming.kind, upcoming.size) <= most

    def _is_wasteful(self, upcoming: Slice, size: int, most: float) -> bool:
        """Whether a part of `size` costs much more per unit than one that `most` seconds have room for."""
        larger = self._largest_part(upcoming, most)
        if larger <= size:
            return False
        each, least = (self._estimate(upcoming.part, units) / units for units in (size, larger))
        return each > WASTE * least

    def _may_be_tried(self, upcoming: Slice, seconds: float) -> bool:
        """Whether a slice that has never run whole is likely to fit."""
        return WHOLE_OF_PARTS * self._estimate(upcoming.part, upcoming.size) <= seconds

    def _largest_part(self, upcoming: Slice, seconds: float) -> int:
        """The largest part that fits: `least` times a power of two, or all; 0 if none does."""
        largest, size = 0, upcoming.least
        while 0 < size < upcoming.size and self._estimate(upcoming.part, size) <= seconds:
            largest, size = size, 2 * size
        if upcoming.least and self._estimate(upcoming.part, upcoming.size) <= seconds:
            return upcoming.size
        return largest

    def run_slice(self, is_serving: bool, granted: int | None = None) -> None:
        """Runs one slice of the next session, or a part of it. A work's error ends only this work."""
        self._run_slice_of(next(iter(self._queues)), is_serving, granted)

    def _run_slice_of(self, name: str, is_serving: bool, granted: int | None) -> None:
        """Runs one slice of session `name`. If another session is in the middle of a microbatch, that one stays
        next."""
        started, queue, is_next = self._clock(), self._queues[name], next(iter(self._queues)) == name
        work, ran = queue.works[0], queue.next_slice
        if granted is not None:
            ran = Slice(ran.part, granted)
            self.parts_run += 1
        finish: Callable[[], None] | None = None
        try:
            queue.advance(granted)
        except StopIteration as stop:
            finish = partial(work.done, stop.value)
        except Exception as error:  # noqa: BLE001 - handed on: `failed` answers it
            finish = partial(work.failed, error)
        if finish is not None:
            queue.works.popleft()
            queue.upcoming = None
            self.calls_ended += 1
        self._turns.add(name, self._clock() - started if self._num_ranks == 1 else 0.0)
        if not queue.works:
            del self._queues[name]
        elif queue.waits_for is not None:
            self._paused[name] = self._queues.pop(name)
        elif finish is not None or (queue.upcoming is not None and queue.upcoming.may_switch):
            self._queues.move_to_end(name)
        else:
            is_next = False  # this session continues with its next slice
        if is_next:
            self._switch(name)
        try:
            if finish is not None:
                finish()
        finally:
            # An error's traceback has this frame. Without this line the frame would keep the error, and with it all
            # that the failed call has computed, until the garbage collector comes.
            finish = None
            self._account(ran, started, is_serving)

    def _switch(self, ran: str) -> None:
        if self._num_ranks > 1:
            self._turns.add(ran, 1.0)
        if self._queues:
            self._queues.move_to_end(self._turns.next_of(self._queues), last=False)

    def _account(self, ran: Slice, started: float, is_serving: bool) -> None:
        self.slices_run += 1
        now = self._clock()
        self._last_ended, seconds = now, now - started
        self._estimate.learn(ran.kind, ran.size, seconds)
        self.share_of_time.add(seconds)
        if is_serving:
            self._not_before = max(self._not_before, started - MAX_CREDIT_SECONDS) + seconds / self.training_share
        else:
            self._not_before = now

    def close(self) -> None:
        """Drops all work; neither `done` nor `failed` is called. Unfinished works leave no effects."""
        for queues in (self._queues, self._paused):
            while queues:
                _, queue = queues.popitem()
                for work in queue.works:
                    work.slices.close()
