"""Bounds the time that the scheduler waits for all grammars together.

The scheduler asks every grammar of a batch for its token's mask, then collects the answers; the processes work in
parallel. All grammars share one waiting budget: at most `step_s` per step, and half of the time in the long run, so
that grammars slow other requests down to half of their speed at most.

CPU time counts, not wall-clock time: on a busy machine a harmless grammar answers late after using little CPU time. A
step's wait reduces the budget by at most the CPU time that the grammars used. When the scheduler has waited for the
whole budget, the late grammars are judged by their CPU time since they were asked. Each may use its share of the
remaining budget, or `least_cpu_s` if `step_s` allows this for all of them. A grammar that has used more is ended; the
scheduler waits for the others. Their shares sum to at most `step_s`, so a step ends within twice `step_s` if one core
is free for grammars. If none is free, the shares shrink from then on, and at four times `step_s` the scheduler waits
only for grammars that have used almost no CPU time.
"""

from __future__ import annotations

import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from kt_runtime.sglang_patch.grammar.allowance import GrammarLimits

TRY_LATER = "; try again later"  # the end of each refusal's message that is due to overload
LONG_RUN_SHARE = 0.5  # share of the scheduler's time that it may wait for grammars
HONEST_CPU_S = 0.002  # for one token; more than the masks of common schemas and vocabularies take
LOOK_SECONDS = 0.01  # between two checks of the late processes' CPU time


@dataclass
class Answer:
    """A grammar process's answer to one question. `data` is None until it arrives, and if the process ended before."""

    data: bytes | None = None


@dataclass(frozen=True)
class Failure:
    """Why a grammar's process was ended. `is_lasting`: the same grammar is refused from then on. `is_busy`: the machine
    is the cause, so clients may retry the grammar's requests."""

    reason: str
    is_lasting: bool = False
    is_busy: bool = False


class AskedProcess(Protocol):
    """The part of `client.GrammarProcess` used here. `num_asked`: questions since all were last answered."""

    connection: socket.socket
    unanswered: deque[Answer]
    num_asked: int

    @property
    def ended(self) -> bool: ...

    def used_cpu_s(self) -> float: ...

    def take_answer(self) -> None: ...

    def fail(self, failure: Failure) -> None: ...


class Patience:
    """The waiting budget of one scheduler, used by its thread only. `left_s`: seconds left after the last step."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.left_s = float("inf")
        self._known_at = clock()

    def collect(self, processes: Iterable[AskedProcess], limits: GrammarLimits) -> None:
        """Collects all outstanding answers of `processes`. Afterwards each process has answered or has ended."""
        began = self._clock()
        left_s = self.left_s = min(limits.step_s, self.left_s + LONG_RUN_SHARE * (began - self._known_at))
        poll, late = select.poll(), {}
        for process in processes:
            if process.unanswered:
                late[process.connection.fileno()] = process
                poll.register(process.connection.fileno(), select.POLLIN)
        share_s, used_s, num_ended = None, 0.0, 0
        while late:
            waited_s = self._clock() - began
            if waited_s >= left_s:
                if share_s is None:
                    share_s = share_of_one(left_s, sum(process.num_asked for process in late.values()), limits)
                end_those_over(late, shrunk(share_s, waited_s, limits), waited_s, limits)
            for number, _ in poll.poll(1000 * max(left_s - waited_s, LOOK_SECONDS)):
                if number in late:
                    late[number].take_answer()
            for number in [number for number, process in late.items() if not process.unanswered]:
                poll.unregister(number)
                process = late.pop(number)
                used_s += process.used_cpu_s()
                num_ended += process.ended
        self._known_at = self._clock()
        waited_s = self._known_at - began
        self.left_s = max(0.0, left_s - (waited_s if num_ended else min(waited_s, used_s)))


def share_of_one(left_s: float, num_asked: int, limits: GrammarLimits) -> float:
    """Seconds of CPU time for one question while `num_asked` questions are late."""
    return min(max(left_s / num_asked, limits.least_cpu_s), limits.step_s / num_asked)


def shrunk(share_s: float, waited_s: float, limits: GrammarLimits) -> float:
    """The share, reduced once a step lasts longer than twice `step_s`."""
    left_of_it = min(1.0, (4 * limits.step_s - waited_s) / (2 * limits.step_s))
    return max(share_s * left_of_it, min(share_s, HONEST_CPU_S))


def end_those_over(late: dict[int, AskedProcess], share_s: float, waited_s: float, limits: GrammarLimits) -> None:
    for process in late.values():
        used_s = process.used_cpu_s()
        if used_s > share_s * process.num_asked:
            process.fail(
                Failure(
                    f"took {used_s:.2g} s of processor time for one token while others waited; all grammars of a step "
                    f"together may take {limits.step_s:g} s"
                )
            )
        elif waited_s >= limits.wait_s:
            process.fail(Failure(f"did not answer within {limits.wait_s:g} s{TRY_LATER}", is_busy=True))
