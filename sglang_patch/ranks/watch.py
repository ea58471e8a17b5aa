"""Watches this host's ranks from their start to their end, and ends the server with the reason that was the first.

SGLang's own watchdog begins when the model is loaded and says only that a process has died; `frontend/stalls.py` begins
with the first answer. Between the start and the first answer a rank that is stopped, or cut off with its host, would be
waited for without end: the other ranks wait for it in gloo for half an hour.

A rank that ended with an error of its own has told the main thread of this process (SIGQUIT), which may know more, such
as that the checkpoint is at fault. So the watch waits longer for the main thread then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from kt_runtime.ranks.failures import FAILED, STOPPED, Failure, cause_of
from kt_runtime.sglang_patch.ranks.processes import RANK, Look, RankProcess, death_of, look_at, placed

POLL_SECONDS = 0.25
STOPPED_SECONDS = 3.0  # a debugger's short look is shorter
CAUSE_SECONDS = 1.0
"""Time from the first failure until the server ends, in which other ranks and hosts fail or report."""
OWN_ERROR_SECONDS = 4.0
HOSTS_SECONDS = 3.0
"""What another host needs to notice a rank's death and to report it; this host's rank may have failed by then."""


class OtherHosts(Protocol):
    """`failures`: of other hosts and of the connections to them, so far."""

    def failures(self) -> list[Failure]: ...


class RankWatch:
    """`first_rank`: of this host. `host`: this host's name, where there are several, and `others` the other ones.
    `cause_s`: 0 on a host that only reports."""

    def __init__(
        self,
        first_rank: int = 0,
        host: str = "",
        others: OtherHosts | None = None,
        look: Callable[[int], Look | None] = look_at,
        clock: Callable[[], float] = time.monotonic,
        cause_s: float = CAUSE_SECONDS,
    ) -> None:
        self._cause_s = cause_s
        self._first_rank, self._host, self._others, self._look, self._clock = first_rank, host, others, look, clock
        self._processes: list[RankProcess] = []
        self._failures: list[Failure] = []
        self._failed_at: float | None = None
        self._stopped_since: dict[int, float] = {}
        self._ending = threading.Lock()
        self._on_failure: Callable[[Failure], None] | None = None

    def add(self, process: RankProcess) -> None:
        """Called for each rank of this host in their order, when it has been started."""
        self._processes = [*self._processes, process]

    def start(self, on_failure: Callable[[Failure], None]) -> None:
        """`on_failure` is called once, in the watch's thread, unless `claim` was called before."""
        self._on_failure = on_failure
        threading.Thread(target=self._run, name="rank-watch", daemon=True).start()

    def claim(self) -> bool:
        """For a thread that ends the server itself: `on_failure` is not called any more. False: it has been."""
        return self._ending.acquire(blocking=False)

    def looks(self) -> list[tuple[int, int, Look]]:
        """(rank, process id, look) of each of this host's ranks that lives."""
        found = [(rank, process.pid or 0) for rank, process in self._ranks() if process.exitcode is None]
        return [(rank, pid, look) for rank, pid in found if (look := self._look(pid)) is not None]

    def wait_for_cause(self, patience_s: float | None = None) -> Failure | None:
        """After `claim`: the cause, once there has been time to find it. None: no rank has failed."""
        if patience_s is None:
            patience_s = CAUSE_SECONDS if self._others is None else HOSTS_SECONDS
        deadline = time.monotonic() + patience_s
        self.check()
        while ((cause := self.cause()) is None or cause.kind == FAILED) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS / 5)
            self.check()
        return cause

    def cause(self) -> Failure | None:
        return cause_of(self._failures)

    def check(self) -> bool:
        """One look. Whether the server is to end now."""
        now = self._clock()
        others = [] if self._others is None else self._others.failures()
        ended = [(rank, process) for rank, process in self._ranks() if process.exitcode]  # 0: in order
        deaths = [death_of(f"{RANK}{rank}", process, self._host) for rank, process in ended]
        own = [death for death in deaths if death is not None]
        self._failures = [*own, *self._stopped(now), *others]
        cause = self.cause()
        if cause is None:
            self._failed_at = None
            return False
        if self._failed_at is None:
            self._failed_at = now
        return now - self._failed_at >= (OWN_ERROR_SECONDS if cause.kind == FAILED else self._cause_s)

    def _run(self) -> None:
        while not self.check():
            time.sleep(POLL_SECONDS)
        if self.claim():
            cause = self.cause()
            assert cause is not None and self._on_failure is not None
            self._on_failure(cause)

    def _ranks(self) -> list[tuple[int, RankProcess]]:
        processes: Sequence[RankProcess] = self._processes
        return list(enumerate(processes, self._first_rank))

    def _stopped(self, now: float) -> list[Failure]:
        looks = self.looks()
        stopped = {pid: rank for rank, pid, look in looks if look.stopped}
        self._stopped_since = {pid: self._stopped_since.get(pid, now) for pid in stopped}
        return [
            Failure(f"{placed(f'{RANK}{rank}', pid, self._host)} is stopped by a signal", STOPPED)
            for pid, rank in stopped.items()
            if now - self._stopped_since[pid] >= STOPPED_SECONDS
        ]
