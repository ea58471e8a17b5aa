"""Decides which slice of which session's work runs next, and whether training may run at all just now.

A `Work` is a generator. Each `next` runs one slice and yields whether its session may be overtaken by another one now
(between two microbatches), since a session in the middle of a microbatch holds its activations. Within a session,
works run in the order in which they came; sessions take turns.

Nothing here knows what a slice computes. Not thread-safe: everything happens on the engine's thread.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any

Slices = Generator[bool, None, Any]
"""Yields after each slice: True when another session may go on. Returns the work's result."""

MAX_CREDIT_SECONDS = 0.05
"""Unused training time is carried over up to this much, so that a pause in training never ends in a long burst."""


@dataclass
class Work:
    """`queue`: the session (or other name) whose order it keeps. Exactly one of `done` and `failed` is called, once."""

    queue: str
    slices: Slices
    done: Callable[[Any], None]
    failed: Callable[[Exception], None]


class Executor:
    """`training_share`: the largest share of the time, in (0, 1], that slices take while requests are served.

    While serving, a slice of d seconds must be followed by d * (1 / share - 1) seconds for serving before the next one
    starts. `clock` returns seconds and never goes back.
    """

    def __init__(self, training_share: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.training_share = training_share
        self._clock = clock
        self._queues: OrderedDict[str, deque[Work]] = OrderedDict()
        self._not_before = clock()
        self._slice_seconds = 0.0  # moving average
        self.slices_run = 0

    @property
    def is_idle(self) -> bool:
        return not self._queues

    def submit(self, work: Work) -> None:
        self._queues.setdefault(work.queue, deque()).append(work)

    def plan(self, is_serving: bool, budget_seconds: float) -> int:
        """How many slices to run now: as many as should fit into `budget_seconds` and the share, 0 if none may run.

        At least one otherwise, however long slices take. A number, so that it can be sent to other ranks beforehand.
        """
        if not self._queues:
            return 0
        seconds = budget_seconds
        if is_serving:
            free = (self._clock() - self._not_before) * self.training_share
            if free < 0:
                return 0
            seconds = min(seconds, free)
        return max(1, int(seconds / self._slice_seconds)) if self._slice_seconds > 0 else 1

    def run(self, num_slices: int, is_serving: bool) -> int:
        """Runs up to `num_slices` slices, fewer when the work ends; returns how many."""
        for count in range(num_slices):
            if not self._queues:
                return count
            self.run_slice(is_serving)
        return num_slices

    def run_slice(self, is_serving: bool) -> None:
        """Runs one slice of the session whose turn it is. The error of a work ends that work and nothing else."""
        started = self._clock()
        name, queue = next(iter(self._queues.items()))
        work, may_switch = queue[0], True
        finish: Callable[[], None] | None = None
        try:
            may_switch = next(work.slices)
        except StopIteration as stop:
            finish = partial(work.done, stop.value)
        except Exception as error:  # noqa: BLE001 - handed on: `failed` answers it
            finish = partial(work.failed, error)
        if finish is not None:
            queue.popleft()
        if not queue:
            del self._queues[name]
        elif may_switch:
            self._queues.move_to_end(name)
        self._account(started, is_serving)
        if finish is not None:
            finish()

    def _account(self, started: float, is_serving: bool) -> None:
        self.slices_run += 1
        now = self._clock()
        seconds = now - started
        self._slice_seconds += (seconds - self._slice_seconds) / (10 if self.slices_run > 1 else 1)
        if is_serving:
            self._not_before = max(self._not_before, started - MAX_CREDIT_SECONDS) + seconds / self.training_share
        else:
            self._not_before = now

    def close(self) -> None:
        """Drops all work; neither `done` nor `failed` is called. Slices that were under way leave no trace."""
        while self._queues:
            _, queue = self._queues.popitem()
            for work in queue:
                work.slices.close()
