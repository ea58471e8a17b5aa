"""What the scheduler waits for grammars, bounded for all of them together.

The scheduler asks every grammar of a batch for its token's mask, then collects the answers: the processes work side by
side. All of them share a budget of waiting, `step_s` at once; in the long run half of the time, so that grammars slow
others down to half of their speed at most.

Processor time counts, not the clock: on a busy machine an honest grammar answers late, having used little. Of a step's
wait no more is taken from the budget than the grammars have used. When the scheduler has waited for as long as the
budget says, those that have not answered are judged by what they have used since they were asked. Each may use its
share of what is left of the budget, and `least_cpu_s` where the budget allows that to all of them. Whoever has used
more is ended; the others are waited for. Their shares together are no more than `step_s`, so a step ends within twice
`step_s` where one core is free for grammars. Where none is, shares shrink from then on, and at four times `step_s` only
those are waited for that have used next to nothing.
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

TRY_LATER = "; try again later"  # ends the message of each refusal that holds only now
LONG_RUN_SHARE = 0.5  # of the scheduler's time that it may wait for grammars
HONEST_CPU_S = 0.002  # for one token; what the masks of common schemas and vocabularies take, and more
LOOK_SECONDS = 0.01  # between two looks at the processor time of those that are late


@dataclass
class Answer:
    """Of a grammar's process to one question. None until it is there, and where the process has ended before."""

    data: bytes | None = None


@dataclass(frozen=True)
class Failure:
    """Why a grammar's process was ended. `is_lasting`: the same grammar is refused from then on. `is_busy`: not its own
    doing, so its requests may be sent again."""

    reason: str
    is_lasting: bool = False
    is_busy: bool = False


class AskedProcess(Protocol):
    """A grammar's process as `client.GrammarProcess` has it. `num_asked`: since no question was without an answer."""

    connection: socket.socket
    unanswered: deque[Answer]
    num_asked: int

    @property
    def ended(self) -> bool: ...

    def used_cpu_s(self) -> float: ...

    def take_answer(self) -> None: ...

    def fail(self, failure: Failure) -> None: ...


class Patience:
    """The budget of one scheduler, used by its thread only. `left_s`: seconds of it after the last step."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.left_s = float("inf")
        self._known_at = clock()

    def collect(self, processes: Iterable[AskedProcess], limits: GrammarLimits) -> None:
        """Takes the answers that `processes` owe. Afterwards each has given them or has ended."""
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
    """Seconds of processor time for one question, where `num_asked` are late."""
    return min(max(left_s / num_asked, limits.least_cpu_s), limits.step_s / num_asked)


def shrunk(share_s: float, waited_s: float, limits: GrammarLimits) -> float:
    """Of a step that lasts for more than twice `step_s`."""
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
