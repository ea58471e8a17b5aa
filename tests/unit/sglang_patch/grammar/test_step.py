"""What grammars cost a step of the scheduler: one budget for all of them, judged by processor time.

The processes here answer when they are told to and have used as much processor time as the test says.
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kt_runtime.sglang_patch.grammar.client import (
    CompiledGrammar,
    GrammarLimits,
    GrammarMatcher,
    GrammarProcess,
    Room,
    collect_masks,
)
from kt_runtime.sglang_patch.grammar.process import HEAD, MASK, MAX_MESSAGE_BYTES, OPEN, PID
from kt_runtime.sglang_patch.grammar.queue import GrammarCache, is_for_now
from kt_runtime.sglang_patch.grammar.step import Patience, share_of_one, shrunk

NUM_SLOW = 40
MASK_WORDS = torch.tensor([5, -2, 7], dtype=torch.int32)
WAIT_SECONDS = 60


class Scripted(GrammarProcess):
    """A child that does nothing; `theirs` is its end of the socket."""

    def __init__(self) -> None:
        ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.child = subprocess.Popen(["sleep", "600"])
        self.theirs.send(PID.pack(self.child.pid))
        self.cpu_s, self.looked_at = 0.0, threading.Event()
        super().__init__(ours)

    def _cpu_s(self) -> float:
        return self.cpu_s

    def used_cpu_s(self) -> float:
        self.looked_at.set()
        return super().used_cpu_s()

    def answer(self) -> None:
        self.theirs.send(MASK_WORDS.numpy().tobytes())

    def received(self) -> list[int]:
        """The kinds of the messages that have come."""
        self.theirs.setblocking(False)
        kinds = []
        while True:
            try:
                kinds.append(HEAD.unpack_from(self.theirs.recv(MAX_MESSAGE_BYTES))[0])
            except BlockingIOError:
                return kinds


Start = Callable[..., tuple[Scripted, GrammarMatcher]]


@pytest.fixture
def room() -> Room:
    return Room(GrammarLimits(step_s=0.05, wait_s=WAIT_SECONDS))


@pytest.fixture
def start(room: Room) -> Iterator[Start]:
    started: list[Scripted] = []

    def start_one(cpu_s: float = 0.0) -> tuple[Scripted, GrammarMatcher]:
        """A grammar that will have used `cpu_s` once it was asked."""
        process = Scripted()
        started.append(process)
        matcher = GrammarMatcher(CompiledGrammar(process, room), max_rollback_tokens=1)
        matcher.ask_for_mask()
        process.cpu_s = cpu_s
        return process, matcher

    yield start_one
    for process in started:
        process.end()
        process.theirs.close()
        process.child.kill()
        process.child.wait()


def rows(matchers: list[GrammarMatcher]) -> tuple[torch.Tensor, list[bool]]:
    bitmask = torch.full((len(matchers), len(MASK_WORDS)), -1, dtype=torch.int32)
    return bitmask, [matcher.fill_next_token_bitmask(bitmask, row) for row, matcher in enumerate(matchers)]


def test_forty_slow_grammars_cost_one_budget_and_those_that_answer_are_untouched(start: Start) -> None:
    slow = [start(cpu_s=0.2) for _ in range(NUM_SLOW)]
    quick = [start(cpu_s=0.2) for _ in range(3)]  # what is answered in time is not judged
    for process, _ in quick:
        process.answer()
    collect_masks([matcher for _, matcher in [*slow, *quick]])
    bitmask, filled = rows([matcher for _, matcher in quick])
    assert all(filled) and torch.equal(bitmask, MASK_WORDS.expand(3, -1))
    assert all(process.ended for process, _ in slow) and not any(process.ended for process, _ in quick)
    for _, matcher in slow:
        assert not matcher.fill_next_token_bitmask(bitmask, 0)
        with pytest.raises(ValueError, match=r"took 0\.2 s of processor time for one token while others waited"):
            matcher.accept_token(1)


def test_a_grammar_that_gets_no_processor_time_is_waited_for(start: Start) -> None:
    starved = [start(cpu_s=0.001) for _ in range(NUM_SLOW)]

    def answer_late() -> None:
        for process, _ in starved:
            assert process.looked_at.wait(WAIT_SECONDS)
        for process, _ in starved:
            process.answer()

    late = threading.Thread(target=answer_late)
    late.start()
    collect_masks([matcher for _, matcher in starved])
    late.join()
    bitmask, filled = rows([matcher for _, matcher in starved])
    assert all(filled) and torch.equal(bitmask, MASK_WORDS.expand(NUM_SLOW, -1))


def answer_once_looked_at(process: Scripted) -> None:
    if process.looked_at.wait(WAIT_SECONDS):
        process.answer()


def test_waiting_on_a_busy_machine_does_not_use_up_the_budget(room: Room, start: Start) -> None:
    now_s = itertools.count(step=0.02)
    room.patience = Patience(lambda: next(now_s))
    process, matcher = start(cpu_s=0.001)
    late = threading.Thread(target=answer_once_looked_at, args=[process])
    late.start()
    collect_masks([matcher])
    late.join()
    assert room.patience.left_s == room.limits.step_s - 0.001


def test_only_the_slowest_are_ended(start: Start) -> None:
    (slow, heavy), (light, honest) = start(cpu_s=0.04), start(cpu_s=0.001)
    late = threading.Thread(target=answer_once_looked_at, args=[light])
    late.start()
    collect_masks([heavy, honest])
    late.join()
    assert slow.ended and not light.ended


def test_what_hangs_without_processor_time_ends_by_the_clock_and_may_be_sent_again(room: Room, start: Start) -> None:
    room.limits = GrammarLimits(step_s=0.01, wait_s=0.02)
    process, matcher = start()
    collect_masks([matcher])
    assert process.failure is not None and process.failure.is_busy
    assert is_for_now(process.failure.reason)
    cache = GrammarCache(lambda grammar: grammar, lambda reason: pytest.fail(reason))
    cache["regex", "a"] = process
    assert cache.get(("regex", "a")) is None, "it is compiled again"


def test_the_budget_comes_back_with_time_only(room: Room, start: Start) -> None:
    """Grammars that use a step's budget each time would halve the speed of all others, not more."""
    now_s = itertools.count(step=0.05)  # so much for each look at the clock
    room.limits = GrammarLimits(step_s=0.2, wait_s=1000, least_cpu_s=0.001)
    room.patience = Patience(lambda: next(now_s))
    _, spending = start(cpu_s=1.0)
    collect_masks([spending])
    heavy, matcher = start(cpu_s=0.1)
    collect_masks([matcher])
    assert heavy.failure is not None and "processor time" in heavy.failure.reason
    for _ in range(40):
        next(now_s)
    quick, matcher = start(cpu_s=0.1)
    quick.answer()
    collect_masks([matcher])
    assert room.patience.left_s >= 0.09


@pytest.mark.parametrize("num_asked", [1, 2, 40, 64, 256])
@pytest.mark.parametrize("left_s", [0.0, 0.1, 0.5])
def test_shares_are_within_the_budget_and_none_is_nothing(num_asked: int, left_s: float) -> None:
    limits = GrammarLimits()
    share_s = share_of_one(left_s, num_asked, limits)
    assert num_asked * share_s <= limits.step_s + 1e-9
    assert share_s >= min(limits.least_cpu_s, limits.step_s / num_asked)


@pytest.mark.parametrize(
    ("share_s", "waited_s", "expected_s"),
    [
        (0.0125, 0.5, 0.0125),
        (0.0125, 1.0, 0.0125),
        (0.0125, 1.5, 0.00625),
        (0.5, 2.0, 0.002),
        (0.5, 4.9, 0.002),
        (0.001, 2.0, 0.001),
    ],
)
def test_shares_shrink_when_a_step_lasts_long(share_s: float, waited_s: float, expected_s: float) -> None:
    assert shrunk(share_s, waited_s, GrammarLimits()) == expected_s


def test_a_mask_is_asked_for_once_and_a_waiting_request_costs_its_grammar_nothing(room: Room, start: Start) -> None:
    process, matcher = start()
    waiting = GrammarMatcher(matcher.compiled, max_rollback_tokens=1)
    matcher.ask_for_mask()
    process.answer()
    collect_masks([matcher])
    rows([matcher])
    assert process.received() == [OPEN, MASK]
    del waiting
    matcher.compiled.drop_closed()
    assert process.received() == []


def test_a_killed_process_ends_its_requests_and_is_not_waited_for(start: Start) -> None:
    process, matcher = start()
    os.kill(process.child.pid, signal.SIGKILL)
    process.theirs.close()
    collect_masks([matcher])
    assert process.ended
    assert process.failure is not None and process.failure.is_lasting
    assert rows([matcher])[1] == [False]


def test_processor_time_is_the_childs_own() -> None:
    child: Any = subprocess.Popen(["sh", "-c", "while :; do :; done"])
    try:
        from kt_runtime.sglang_patch.grammar.client import cpu_clock_of

        clock, deadline = cpu_clock_of(child.pid), time.monotonic() + WAIT_SECONDS
        while time.clock_gettime(clock) < 0.05:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        child.kill()
        child.wait()
    with pytest.raises(OSError):
        cpu_clock_of(child.pid)
