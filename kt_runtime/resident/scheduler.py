"""Decides which session's slice runs next, and whether training may run now.

A `Work` is a generator of slices. It yields a description (`Slice`) of its *next* slice; each `next` runs the slice
that was announced last. The code up to the first yield is the slice `opening`. A session's works run in order of
submission. Sessions alternate only before a slice with `may_switch`: in the middle of a microbatch, a session holds
activations.

**End of a turn.** A turn has a budget of seconds and runs at least one slice. The scheduler estimates a slice's
duration per kind and size, from earlier slices of that kind.

- One rank: the scheduler reads the clock after each slice. The turn ends if the next slice is not expected to fit into
  the rest of the budget, or if it has no estimate yet: such a slice starts a new turn. So a turn takes at most the
  budget plus one slice, however wrong the estimates are.
- Several ranks: all ranks must run the same slices, so no rank may stop by its own clock. Rank 0 decides the number of
  slices before the turn and broadcasts it. It counts announced slices only: of the run of alike slices at the head of
  the queue, as many as fit by their estimate, or one without an estimate.

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

UNBOUNDED_SLICES = 1 << 30
MAX_CREDIT_SECONDS = 0.05
"""Upper bound on unused training time that is carried over, so that no long burst follows an idle phase of training."""

FORGETTING = 4
"""With each slice, a too high estimate falls by a quarter of the difference. A too low estimate rises immediately."""


class Slice(NamedTuple):
    """Describes a work's next slice. `kind`: slices of one kind run the same operation on different data.

    `size`: the slice's time grows with this number, in the kind's own unit (tokens of a layer, elements of an optimizer
    step). `alike`: the known number of consecutive slices of this kind and size, this one included. `may_switch`:
    another session may run before this slice.
    """

    kind: str
    size: int = 1
    alike: int = 1
    may_switch: bool = False


class Pause(NamedTuple):
    """The work's next slice, `then`, does not run before `TrainingScheduler.resume(key)`."""

    key: str
    then: Slice


Slices = Generator[Slice | Pause, None, Any]
"""Yields the description of each slice but the first, before it runs. Returns the work's result."""


def run_at_once(slices: Slices) -> Any:
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
    """The bounds of one turn. `seconds`: the turn's time budget; None: only `num_slices` ends the turn."""

    num_slices: int = 0
    seconds: float | None = None


class Estimates:
    """Learned seconds per unit of size, for each kind. Sizes between two powers of two share an estimate."""

    def __init__(self) -> None:
        self._seconds_per_unit: dict[tuple[str, int], float] = {}

    def __call__(self, upcoming: Slice) -> float:
        """Expected seconds; infinite if no slice of this kind and about this size has run yet."""
        return self._seconds_per_unit.get(_bucket(upcoming), math.inf) * max(upcoming.size, 1)

    def learn(self, ran: Slice, seconds: float) -> None:
        bucket, found = _bucket(ran), seconds / max(ran.size, 1)
        known = self._seconds_per_unit.get(bucket, 0.0)
        self._seconds_per_unit[bucket] = max(found, known + (found - known) / FORGETTING)


def _bucket(of: Slice) -> tuple[str, int]:
    return of.kind, max(of.size, 1).bit_length()


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

    def advance(self) -> None:
        """Runs the next slice. Raises StopIteration at the work's end."""
        slices = self.works[0].slices
        error, self.error = self.error, None
        announced = next(slices) if error is None else slices.throw(error)
        if isinstance(announced, Pause):
            self.waits_for, self.upcoming = announced
        else:
            self.upcoming = announced


class TrainingScheduler:
    """`training_share`: the largest share of the time, in (0, 1], that slices may take while requests are served.

    While serving, a slice of d seconds is followed by d * (1 / share - 1) seconds for serving before the next slice.
    `clock`: monotonic seconds. `num_ranks`: number of processes that run the same slices.
    """

    def __init__(
        self, training_share: float, clock: Callable[[], float] = time.monotonic, *, num_ranks: int = 1
    ) -> None:
        self.training_share = training_share
        self._clock, self._num_ranks = clock, num_ranks
        self._queues: OrderedDict[str, _Queue] = OrderedDict()
        self._paused: dict[str, _Queue] = {}
        self._not_before = clock()
        self._estimate = Estimates()
        self.slices_run = 0

    @property
    def is_idle(self) -> bool:
        """No slice can run now; paused works may exist."""
        return not self._queues

    def submit(self, work: Work) -> None:
        queue = self._paused.get(work.queue) or self._queues.setdefault(work.queue, _Queue())
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

    def plan(self, is_serving: bool, budget_seconds: float, *, arrives: bool = False) -> Plan:
        """The plan of the turn that begins now: the slices that fit into `budget_seconds` and the share.

        The plan is empty without work, or while training owes time to serving. Otherwise it has at least one slice,
        however long. `arrives`: work will be submitted before the turn. The plan can be broadcast to other ranks.
        """
        if not self._queues and not (arrives and not is_serving):
            return Plan()
        seconds = budget_seconds
        if is_serving:
            free = (self._clock() - self._not_before) * self.training_share
            if free < 0:
                return Plan()
            seconds = min(seconds, free)
        if self._num_ranks == 1:
            return Plan(UNBOUNDED_SLICES, seconds)
        return Plan(self._num_fitting(seconds))

    def _num_fitting(self, seconds: float) -> int:
        if not self._queues:
            return 1
        upcoming = next(iter(self._queues.values())).next_slice
        each = self._estimate(upcoming)
        if math.isinf(each) or (upcoming.may_switch and len(self._queues) > 1):
            return 1
        return max(1, min(upcoming.alike, int(seconds / each) if each > 0 else upcoming.alike))

    def run(self, plan: Plan, is_serving: bool) -> int:
        """Runs the slices of one turn; returns their number, which is smaller if the work ends early."""
        ends = math.inf if plan.seconds is None else self._clock() + plan.seconds
        count = 0
        while count < plan.num_slices and self._queues and not (count and self._is_over(ends)):
            self.run_slice(is_serving)
            count += 1
        return count

    def _is_over(self, ends: float) -> bool:
        if math.isinf(ends):
            return False
        return self._clock() + self._estimate(next(iter(self._queues.values())).next_slice) > ends

    def run_slice(self, is_serving: bool) -> None:
        """Runs one slice of the next session. A work's error ends only this work."""
        started = self._clock()
        name, queue = next(iter(self._queues.items()))
        work, ran = queue.works[0], queue.next_slice
        finish: Callable[[], None] | None = None
        try:
            queue.advance()
        except StopIteration as stop:
            finish = partial(work.done, stop.value)
        except Exception as error:  # noqa: BLE001 - handed on: `failed` answers it
            finish = partial(work.failed, error)
        if finish is not None:
            queue.works.popleft()
            queue.upcoming = None
        if not queue.works:
            del self._queues[name]
        elif queue.waits_for is not None:
            self._paused[name] = self._queues.pop(name)
        elif finish is not None or (queue.upcoming is not None and queue.upcoming.may_switch):
            self._queues.move_to_end(name)
        try:
            if finish is not None:
                finish()
        finally:
            self._account(ran, started, is_serving)

    def _account(self, ran: Slice, started: float, is_serving: bool) -> None:
        self.slices_run += 1
        now = self._clock()
        seconds = now - started
        self._estimate.learn(ran, seconds)
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
