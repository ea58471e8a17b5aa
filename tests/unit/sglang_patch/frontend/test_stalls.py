"""When the engine is taken as stalled, by a clock and looks of the test's own. Real processes: system/faults."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from kt_runtime.sglang_patch.frontend.stalls import (
    BUSY_SHARE,
    GRACE_SECONDS,
    HUNG_SECONDS,
    POLL_SECONDS,
    RANK_SECONDS,
    SILENT_SECONDS,
    EngineStalled,
    Stalls,
)
from kt_runtime.sglang_patch.ranks.processes import Look, rank_names

SCHEDULER, DETOKENIZER = 11, 12


class Engine:
    """A manager with `waiting` requests, whose processes are as `looks` says; a clock that the test moves."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.now, self.heard_at, self.waiting = 1000.0, 990.0, 0
        self.looks: dict[int, Look | None] = {pid: Look(False, 5.0) for pid in (SCHEDULER, DETOKENIZER)}
        self.probes: list[asyncio.Future[None]] = []
        self.ended: list[Exception] = []
        self.lost: list[str] = []
        self.elsewhere: dict[str, Look] = {}
        self.watches([("scheduler", SCHEDULER), ("detokenizer", DETOKENIZER)])

    def watches(self, processes: list[tuple[str, int]]) -> None:
        self.stalls = Stalls(
            self, processes, look=self.looks.__getitem__, clock=lambda: self.now, elsewhere=self.elsewhere.copy
        )

    def num_waiting(self) -> int:
        return self.waiting + sum(not probe.done() for probe in self.probes)

    def ask_for_a_token(self) -> asyncio.Future[None]:
        self.probes.append(self.loop.create_future())
        return self.probes[-1]

    def end_waiting(self, error: Exception) -> None:
        self.ended.append(error)

    def end_server(self, why: str) -> None:
        self.lost.append(why)

    def after(self, seconds: float, main_share: float = 0.0) -> str:
        """Checks as `watch` does while time passes; the scheduler's main thread computes that share of it."""
        for _ in range(round(seconds / POLL_SECONDS)):
            self.now += POLL_SECONDS
            look = self.looks[SCHEDULER]
            if look is not None:
                self.looks[SCHEDULER] = Look(look.stopped, look.main_seconds + main_share * POLL_SECONDS)
            self.stalls.check()
        return self.stalls.reason


@pytest.fixture
def engine() -> Iterator[Engine]:
    with asyncio.Runner() as runner:
        yield Engine(runner.get_loop())


def test_an_idle_engine_is_left_alone(engine: Engine) -> None:
    assert engine.after(3600) == "" and not engine.probes


def test_a_long_batch_is_no_stall(engine: Engine) -> None:
    engine.waiting = 3
    assert engine.after(600, main_share=0.04) == "" and not engine.ended


def test_silence_without_work_is_a_stall_after_a_token_was_asked_for_too(engine: Engine) -> None:
    engine.after(1)
    engine.waiting = 1
    assert engine.after(SILENT_SECONDS) == "" and len(engine.probes) == 1
    why = engine.after(HUNG_SECONDS - SILENT_SECONDS)
    assert why.startswith(
        "the scheduler (process 11) and the detokenizer (process 12) compute nothing and have answered"
    )
    assert len(engine.probes) == 1


def test_any_message_shows_that_the_engine_works(engine: Engine) -> None:
    """As that about the token, while a request waits for a grammar that another process compiles."""
    engine.waiting = 1
    for _ in range(10):
        assert engine.after(HUNG_SECONDS - 1) == ""
        engine.heard_at = engine.now + 0.1
    assert not engine.ended


def test_a_token_that_a_busy_scheduler_left_out_is_no_request_that_waits(engine: Engine) -> None:
    """Asked for while a batch takes long on a machine that has no time for it; the batch is the answer."""
    engine.after(1)
    engine.waiting = 1
    engine.after(SILENT_SECONDS)
    engine.waiting, engine.heard_at = 0, engine.now + 0.1
    assert engine.after(600) == "" and len(engine.probes) == 1 and engine.probes[0].cancelled()


def test_a_thread_that_only_polls_does_not_count_as_one_that_computes(engine: Engine) -> None:
    engine.waiting = 1
    assert engine.after(2 * HUNG_SECONDS, main_share=BUSY_SHARE / 2) != ""


def test_requests_end_once_with_the_reason_and_a_message_ends_the_stall(engine: Engine) -> None:
    engine.after(1)
    engine.waiting = 2
    why = engine.after(HUNG_SECONDS)
    assert why and not engine.ended
    engine.after(GRACE_SECONDS)
    (error,) = engine.ended
    assert isinstance(error, EngineStalled) and "compute nothing" in str(error)
    engine.waiting = 0
    assert engine.after(30) != "" and len(engine.ended) == 1
    engine.heard_at = engine.now + 0.1
    assert engine.after(POLL_SECONDS) == ""
    engine.waiting = 1
    assert engine.after(HUNG_SECONDS + GRACE_SECONDS) != "" and len(engine.ended) == 2


@pytest.mark.parametrize("pid", [SCHEDULER, DETOKENIZER])
def test_a_stopped_process_is_a_stall_also_while_nobody_waits_and_another_computes(engine: Engine, pid: int) -> None:
    engine.looks[pid] = Look(True, 5.0)
    assert engine.after(POLL_SECONDS) == ""  # as under a debugger's short look
    why = engine.after(POLL_SECONDS, main_share=1.0 if pid == DETOKENIZER else 0.0)
    assert why == f"the {'scheduler' if pid == SCHEDULER else 'detokenizer'} (process {pid}) is stopped by a signal"
    engine.looks[pid] = Look(False, 5.0)
    engine.heard_at = engine.now + 0.1
    assert engine.after(POLL_SECONDS) == ""


def test_a_process_that_ended_is_not_judged(engine: Engine) -> None:
    engine.looks[SCHEDULER] = None
    assert engine.after(10) == ""


def test_a_stopped_rank_ends_the_server(engine: Engine) -> None:
    """The others can't go on without it, and the requests of all are lost."""
    engine.watches(rank_names([("scheduler_0", SCHEDULER), ("scheduler_1", DETOKENIZER)]))
    engine.looks[DETOKENIZER] = Look(True, 5.0)
    assert engine.after(RANK_SECONDS) == f"rank 1 (process {DETOKENIZER}) is stopped by a signal" and not engine.lost
    engine.after(2 * POLL_SECONDS)
    assert engine.lost[0] == f"rank 1 (process {DETOKENIZER}) is stopped by a signal"


def test_ranks_that_hang_end_the_server_within_ten_seconds(engine: Engine) -> None:
    engine.watches(rank_names([("scheduler_0", SCHEDULER), ("scheduler_1", DETOKENIZER)]))
    engine.waiting = 1
    engine.after(HUNG_SECONDS + RANK_SECONDS - POLL_SECONDS)
    assert not engine.lost
    engine.after(2 * POLL_SECONDS)
    assert engine.lost[0].startswith("rank 0 (process 11) and rank 1 (process 12) compute nothing")
    assert HUNG_SECONDS + RANK_SECONDS + 2 * POLL_SECONDS < 10


def test_a_rank_that_computes_on_another_host_is_no_stall_and_one_that_is_stopped_there_is(engine: Engine) -> None:
    there = "rank 1 (process 7 on host 1)"
    engine.elsewhere = {there: Look(False, 0.0)}
    engine.watches([("rank 0", SCHEDULER)])
    engine.waiting = 1
    for seconds in range(60):
        engine.elsewhere[there] = Look(False, float(seconds))
        assert engine.after(1) == ""
    engine.elsewhere[there] = Look(True, 60.0)
    engine.after(RANK_SECONDS + 3 * POLL_SECONDS)
    assert engine.lost[0] == f"{there} is stopped by a signal"


def test_a_single_scheduler_is_no_rank_and_ends_nothing(engine: Engine) -> None:
    processes = [("scheduler_0", SCHEDULER), ("detokenizer_0", DETOKENIZER)]
    assert rank_names(processes) == processes
    engine.watches(processes)
    engine.looks[SCHEDULER] = Look(True, 5.0)
    assert engine.after(60) and not engine.lost
