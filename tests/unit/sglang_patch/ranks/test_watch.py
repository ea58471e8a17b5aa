"""When this host's ranks end the server, by a clock and processes of the test's own. Real processes: system/ranks."""

from __future__ import annotations

import threading

import pytest

from kt_runtime.ranks.failures import CUT_OFF, FAILED, SIGNALLED, Failure
from kt_runtime.sglang_patch.ranks.processes import Look
from kt_runtime.sglang_patch.ranks.watch import (
    CAUSE_SECONDS,
    OWN_ERROR_SECONDS,
    POLL_SECONDS,
    STOPPED_SECONDS,
    RankWatch,
)

SECONDS = 60.0


class Process:
    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.exitcode: int | None = None


class Ranks:
    """Ranks 2 and 3 of a server; a clock that the test moves. `others`: what other hosts say."""

    def __init__(self, host: str = "") -> None:
        self.now, self.others = 100.0, list[Failure]()
        self.processes = [Process(12), Process(13)]
        self.stopped: set[int] = set()
        self.watch = RankWatch(2, host, self, look=lambda pid: Look(pid in self.stopped, 1.0), clock=lambda: self.now)
        for process in self.processes:
            self.watch.add(process)

    def failures(self) -> list[Failure]:
        return self.others

    def ends_after(self, seconds: float = 30.0) -> float | None:
        """Seconds until the watch ends the server; None: it does not."""
        for step in range(round(seconds / POLL_SECONDS)):
            if self.watch.check():
                return step * POLL_SECONDS
            self.now += POLL_SECONDS
        return None

    def why(self) -> str:
        cause = self.watch.cause()
        return "" if cause is None else cause.why


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


def test_ranks_that_live_or_have_ended_in_order_are_left_alone(ranks: Ranks) -> None:
    assert ranks.ends_after() is None and ranks.why() == ""
    ranks.processes[0].exitcode = 0
    assert ranks.ends_after() is None


def test_a_rank_that_a_signal_has_ended_is_named_soon(ranks: Ranks) -> None:
    ranks.processes[0].exitcode = 1
    ranks.processes[1].exitcode = -9
    assert ranks.ends_after() == CAUSE_SECONDS
    assert ranks.why() == "rank 3 (process 13) has died: SIGKILL"


def test_a_rank_that_failed_by_itself_leaves_time_for_who_knows_more(ranks: Ranks) -> None:
    ranks.processes[0].exitcode = 1
    assert (
        ranks.ends_after() == OWN_ERROR_SECONDS
        and ranks.why() == "rank 2 (process 12) has died: it ended with status 1"
    )


def test_a_stopped_rank_is_named_unless_it_goes_on(ranks: Ranks) -> None:
    ranks.stopped = {13}
    assert ranks.ends_after(STOPPED_SECONDS) is None and ranks.why() == ""
    ranks.stopped = set()
    assert ranks.ends_after() is None
    ranks.stopped = {13}
    assert ranks.ends_after() == STOPPED_SECONDS + CAUSE_SECONDS
    assert ranks.why() == "rank 3 (process 13) is stopped by a signal"


def test_a_host_is_named_with_the_rank() -> None:
    ranks = Ranks("host 1, 10.0.0.2")
    ranks.processes[1].exitcode = -11
    assert ranks.ends_after() == CAUSE_SECONDS
    assert ranks.why() == "rank 3 (process 13 on host 1, 10.0.0.2) has died: SIGSEGV"


def test_what_another_host_reports_comes_before_what_it_has_caused_here(ranks: Ranks) -> None:
    ranks.processes[0].exitcode = 1
    assert ranks.ends_after(POLL_SECONDS) is None
    ranks.others = [Failure("host 0 has gone", CUT_OFF), Failure("rank 0 (process 5 on host 0) has died", SIGNALLED)]
    assert ranks.ends_after() is not None and ranks.why() == "rank 0 (process 5 on host 0) has died"


def test_the_end_comes_once_from_its_own_thread_or_from_who_claims_it() -> None:
    ended: list[Failure] = []
    has_ended = threading.Event()
    ranks = Ranks()
    ranks.processes[0].exitcode = -9
    ranks.now = 0.0
    ranks.watch.check()
    ranks.now = 10.0

    def end(failure: Failure) -> None:
        ended.append(failure)
        has_ended.set()

    ranks.watch.start(end)
    assert has_ended.wait(SECONDS) and not ranks.watch.claim()
    assert [each.kind for each in ended] == [SIGNALLED]

    claimed = Ranks()
    claimed.processes[0].exitcode = 1
    assert claimed.watch.claim()
    claimed.watch.start(ended.append)
    cause = claimed.watch.wait_for_cause(0.0)
    assert cause is not None and cause.kind == FAILED and len(ended) == 1


def test_looks_are_of_ranks_that_live(ranks: Ranks) -> None:
    ranks.processes[0].exitcode, ranks.stopped = -9, {13}
    assert ranks.watch.looks() == [(3, 13, Look(True, 1.0))]
