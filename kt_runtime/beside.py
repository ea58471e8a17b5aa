"""Work on large adapters beside the engine's batches: in small pieces, between the batches.

A decode step waits for the slowest of its threads, one on each processor, some hundred times: whatever else computes
meanwhile makes the step longer by as much, and is slowed down itself, to a quarter of its speed where it moves memory,
since a step reads weights as fast as memory gives them. So threads that read, check, hash, convert, write or free a
large adapter (`give_way`) do so in pieces of about `PIECE_BYTES`, a millisecond each, and call `pause` before each
piece. The engine says when it computes (`Batches.computing`): meanwhile `pause` waits, without any lock. After a batch
beside which a thread had to wait, the engine's thread sleeps for a moment (`Batches.give`), so that these threads have
all processors; where nothing is served, they have them all the time. It does not look whether they are at work: a piece
whose pages the system commits first takes many milliseconds, and so does one that waits for a disk.

After the prompt that follows a decode step the engine's thread does not sleep: streams have waited for the prompt
already, and wait for one thing at a time. It sleeps after the next batch, of whatever kind.

So a publication makes each step longer by at most `GIVEN` of it, and `MOST_GIVEN_SECONDS`, however large the adapter
is. After a step that took longer than usual the engine's thread sleeps for less, at least `LEAST_GIVEN_SECONDS`:
a stream then waits about as long as for a usual step and `MOST_GIVEN_SECONDS`, or for the step alone. There is progress
during a long batch, too, of `SHARE` of its time after the first `ALONE_SECONDS`: a long prompt does not stop a
publication.

The client of a small adapter waits for it, and it is ready within 40 ms on free processors. Its threads (`hurry`) never
pause. If it is not ready at a batch's end, the engine's thread sleeps until it is (`ended`), at most `WAITED` of the
batch's time and `LEAST_WAITED_SECONDS`: it would be ready a whole step later otherwise. A thread that a file system
keeps waiting is waited for no longer than `HURRY_SECONDS`.

Which pieces there are does not depend on time: nothing computed here depends on when it was paused.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kt_runtime import priority

PIECE_BYTES = 2 << 20
ALONE_SECONDS = 0.08
"""Nothing computes beside a batch before it has taken so long: most decode steps end earlier."""
SHARE = 0.05
"""Of a batch's time from then on, that each thread beside it may compute."""
GIVEN, MOST_GIVEN_SECONDS = 0.4, 0.008
"""After a batch the engine's thread sleeps for this share of its time, at most so long."""
LEAST_GIVEN_SECONDS = 0.001
"""After a step that took longer than usual: a publication goes on, whatever steps take."""
USUAL_STEPS = 16
"""About so many of the last steps say how long one usually takes."""
WAITED, LEAST_WAITED_SECONDS, MOST_WAITED_SECONDS = 0.5, 0.008, 0.03
"""While a thread hurries, it sleeps for this share of the batch's time and for so long, at most so long in all."""
HURRY_SECONDS = 0.5
"""A thread that hurries takes no longer, or waits for something else than a processor."""
LATELY_SECONDS = 1.0
"""Requests are served, if a batch ended so recently; threads work, if one began a piece so recently."""
DOZE_SECONDS = 0.001
"""It sleeps for so long at once, and looks whether the thread that hurries has ended."""


class Batches:
    """When the engine of this process computes. `computing` and `give` are for the engine's thread, the rest is for
    others.

    `clock`: monotonic seconds. `used`: the calling thread's seconds of processor time. `sleep`: of the engine's thread.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        used: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock, self._used, self._sleep = clock, used, sleep
        self._changed = threading.Condition()
        self._number, self._seconds = 0, 0.0  # of the latest batch; 0 after `give`
        self._ended = float("-inf")  # when the latest batch did
        self._began: float | None = None  # None: no batch is computed
        self._is_prompt, self._is_step = False, False  # the latest batch
        self._puts_off = False  # the sleep after the latest batch comes after the next one
        self._usual: float | None = None  # seconds of a step
        self._has_paused = False
        self._worked = float("-inf")  # when a thread that gives way last began a piece
        self._of_thread = threading.local()
        self._hurrying: dict[int, float] = {}  # since when, by thread

    @contextmanager
    def computing(self, *, is_prompt: bool = False, is_step: bool = False) -> Iterator[None]:
        """A batch is computed in the block, by any number of threads. `is_prompt`: no stream gets a token by it.
        `is_step`: every stream gets one token, and nothing else is done."""
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
        """Whether threads that give way, or hurry, work or have just worked."""
        return bool(self._hurrying) or self._clock() - self._worked < LATELY_SECONDS

    def give(self) -> None:
        """Between two batches: sleeps while a thread hurries, or, if one has paused beside the last batch, for the time
        that is given. Not after a first prompt: then after the batch that follows it."""
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
        """After a batch that took so long. Other batches than steps are not compared."""
        whole = min(MOST_GIVEN_SECONDS, GIVEN * seconds)
        if not self._is_step or self._usual is None:
            return whole
        return min(whole, max(LEAST_GIVEN_SECONDS, self._usual + whole - seconds))

    def _hurries(self, now: float) -> bool:
        return any(now - since < HURRY_SECONDS for since in list(self._hurrying.values()))

    def hurry(self) -> None:
        """The engine waits for this thread after batches, until the thread calls `ended`."""
        self._hurrying[threading.get_ident()] = self._clock()

    def ended(self) -> None:
        """The engine need not wait for this thread. Without `hurry` there is nothing to do."""
        self._hurrying.pop(threading.get_ident(), None)

    def give_way(self) -> None:
        """From now on `pause` waits on this thread."""
        self._of_thread.number = 0

    def gives_way(self) -> bool:
        """Whether `pause` waits on this thread."""
        return hasattr(self._of_thread, "number")

    def pause(self) -> None:
        """Before each piece of work. Returns at once on a thread that has not called `give_way`."""
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
        """Until the batch has ended, at most so long."""
        with self._changed:
            self._changed.wait_for(lambda: self._began is None or self._number != number, seconds)


BATCHES = Batches()
"""Of this process's engine."""
pause = BATCHES.pause


def give_way() -> None:
    """From now on this thread gives way to the engine's: by its priority, and where it calls `pause`."""
    priority.give_way()
    BATCHES.give_way()


def piece(items: int, num_bytes: int) -> int:
    """How many of `items`, which have `num_bytes` in all, are a piece: at least one."""
    return max(1, items * PIECE_BYTES // max(num_bytes, 1))
