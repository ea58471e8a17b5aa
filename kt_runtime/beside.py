"""Background work on adapters, run between the engine's batches.

A decode step has one thread on each core, and its threads synchronise some hundred times, each time with the slowest.
Any other thread that computes during the step lengthens it by its own time. That thread is slow, too: copies of memory
run at a quarter of their speed, since the step uses all memory bandwidth.

**Background threads** read, check, hash, convert, write or free a large adapter (`give_way`). They work in pieces of
about `PIECE_BYTES`, a millisecond each, and call `pause` before each piece. While the engine computes a batch
(`Batches.computing`), `pause` waits, without any lock. If a background thread had to wait during a batch, the engine's
thread sleeps for a moment after it (`Batches.give`), so that background threads have all cores. Without requests they
always have them. The engine does not check whether they are computing: a piece takes many milliseconds if the system
must commit its pages or if it waits for a disk.

After a prefill that follows a decode step the engine's thread does not sleep, since the streams have already waited for
the prefill. It sleeps after the next batch instead, of any kind.

So a publication lengthens each step by at most the share `GIVEN` and at most `MOST_GIVEN_SECONDS`, for any size of
adapter. After a step that took longer than usual the sleep is shorter, but at least `LEAST_GIVEN_SECONDS`: a stream
then waits about as long as for a usual step and its sleep, or for the long step alone. During a long batch, each
background thread may use `SHARE` of the time after the first `ALONE_SECONDS`, so a long prefill does not stop a
publication.

**Urgent threads** (`hurry`) work on a small adapter, which is ready within 40 ms on free cores and for which a client
waits. They never pause. If one has not finished (`ended`) at a batch's end, the engine's thread sleeps until it has:
without that sleep the adapter would be ready a whole step later. The sleep is at most `WAITED` of the batch's time plus
`LEAST_WAITED_SECONDS`, and at most `MOST_WAITED_SECONDS`. The engine ignores a thread that has been urgent for more
than `HURRY_SECONDS`: it waits for a file system.

How work is cut into pieces does not depend on time, so no result depends on pauses.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kt_runtime import priority

PIECE_BYTES = 2 << 20
ALONE_SECONDS = 0.08
"""Background threads stay paused for this first part of a batch: most decode steps end earlier."""
SHARE = 0.05
"""After that, the share of the batch's time that each background thread may use."""
GIVEN, MOST_GIVEN_SECONDS = 0.4, 0.008
"""Sleep of the engine's thread after a batch: its share of the batch's time, and its upper bound."""
LEAST_GIVEN_SECONDS = 0.001
"""Minimum sleep after a step that took longer than usual, so that a publication still progresses."""
USUAL_STEPS = 16
"""The usual time of a step is a running mean over about this number of steps."""
WAITED, LEAST_WAITED_SECONDS, MOST_WAITED_SECONDS = 0.5, 0.008, 0.03
"""Longest sleep for urgent threads: a share of the batch's time plus seconds, and the upper bound of this sum."""
HURRY_SECONDS = 0.5
"""Longest time for which a thread is urgent: one that takes longer waits for something other than a core."""
LATELY_SECONDS = 1.0
"""Requests count as being served for so long after a batch, and threads as working for so long after a piece began."""
DOZE_SECONDS = 0.001
"""Poll interval while the engine's thread sleeps for urgent threads."""


class Batches:
    """The times at which this process's engine computes batches. The engine's thread calls `computing` and `give`,
    other threads the rest.

    `clock`: monotonic seconds. `used`: the calling thread's CPU time in seconds. `sleep`: how the engine's thread
    sleeps.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        used: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock, self._used, self._sleep = clock, used, sleep
        self._changed = threading.Condition()
        self._number, self._seconds = 0, 0.0  # number and duration of the latest batch; 0 seconds after `give`
        self._ended = float("-inf")  # end of the latest batch
        self._began: float | None = None  # start of the present batch; None: no batch is computed
        self._is_prompt, self._is_step = False, False  # kind of the latest batch
        self._puts_off = False  # the sleep after the latest batch is postponed to the end of the next one
        self._usual: float | None = None  # mean seconds of a step
        self._has_paused = False
        self._worked = float("-inf")  # when a background thread last began a piece
        self._of_thread = threading.local()
        self._hurrying: dict[int, float] = {}  # urgent threads, and since when

    @contextmanager
    def computing(self, *, is_prompt: bool = False, is_step: bool = False) -> Iterator[None]:
        """The engine computes a batch inside this context, with any number of threads. `is_prompt`: the batch is a
        prefill, from which no stream gets a token. `is_step`: it is a decode step, with one token for every stream."""
        self._number += 1
        self._is_prompt, self._is_step = is_prompt, is_step
        began = self._began = self._clock()
        try:
            yield
        finally:
            self._began, self._ended = None, self._clock()
            self._seconds = self._ended - began
            if is_step:
                usual = self._seconds if self._usual is None else self._usual
                self._usual = usual + (self._seconds - usual) / USUAL_STEPS
            if self._has_paused:
                with self._changed:
                    self._changed.notify_all()

    def are_computed(self) -> bool:
        """Whether requests are served: a batch is computed, or was less than `LATELY_SECONDS` ago."""
        return self._began is not None or self._clock() - self._ended < LATELY_SECONDS

    def has_work_beside(self) -> bool:
        """Whether a background or urgent thread works now or has just worked."""
        return bool(self._hurrying) or self._clock() - self._worked < LATELY_SECONDS

    def give(self) -> None:
        """Sleeps between two batches: for urgent threads, and, if a background thread paused during the last batch, for
        background threads. A sleep due after a prefill is postponed once, to the end of the next batch."""
        seconds, self._seconds = self._seconds, 0.0
        if not seconds or not (self._has_paused or self._hurrying):
            return
        self._puts_off = self._is_prompt and not self._puts_off
        if self._puts_off:
            return
        has_paused, self._has_paused = self._has_paused, False
        now = self._clock()
        given = now + (self._given(seconds) if has_paused else 0.0)
        waited = now + min(MOST_WAITED_SECONDS, WAITED * seconds + LEAST_WAITED_SECONDS)
        while (left := (waited if self._hurries(now) else given) - now) > 0:
            self._sleep(min(DOZE_SECONDS, left))
            now = self._clock()

    def _given(self, seconds: float) -> float:
        """Sleep for background threads after a batch that took `seconds`. Only decode steps are compared with usual
        ones."""
        whole = min(MOST_GIVEN_SECONDS, GIVEN * seconds)
        if not self._is_step or self._usual is None:
            return whole
        return min(whole, max(LEAST_GIVEN_SECONDS, self._usual + whole - seconds))

    def _hurries(self, now: float) -> bool:
        return any(now - since < HURRY_SECONDS for since in list(self._hurrying.values()))

    def hurry(self) -> None:
        """Makes this thread urgent: the engine sleeps for it after batches, until the thread calls `ended`."""
        self._hurrying[threading.get_ident()] = self._clock()

    def ended(self) -> None:
        """This thread is no longer urgent. No effect without `hurry`."""
        self._hurrying.pop(threading.get_ident(), None)

    def give_way(self) -> None:
        """Makes this thread a background thread: from now on its `pause` waits."""
        self._of_thread.number = 0

    def gives_way(self) -> bool:
        """Whether this thread is a background thread, whose `pause` waits."""
        return hasattr(self._of_thread, "number")

    def pause(self) -> None:
        """Waits while the engine needs the cores; call it before each piece of work. Returns at once unless this thread
        is a background thread."""
        of_thread = self._of_thread
        if not self.gives_way():
            return
        while (began := self._began) is not None:
            number, used = self._number, self._used()
            if of_thread.number != number:
                of_thread.number, of_thread.before = number, used
            seconds = ALONE_SECONDS + (used - of_thread.before) / SHARE - (self._clock() - began)
            if seconds <= 0:
                break
            self._has_paused = True
            self._wait(number, seconds)
        self._worked = self._clock()

    def _wait(self, number: int, seconds: float) -> None:
        """Waits until the batch has ended, at most `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: self._began is None or self._number != number, seconds)


BATCHES = Batches()
"""The batches of this process's engine."""
pause = BATCHES.pause


def give_way() -> None:
    """Makes this thread a background thread: from now on it has a lower priority, and waits in `pause`."""
    priority.give_way()
    BATCHES.give_way()


def piece(items: int, num_bytes: int) -> int:
    """Number of items in a piece, at least one, if `items` of them have `num_bytes` in total."""
    return max(1, items * PIECE_BYTES // max(num_bytes, 1))
