"""Finds, from the frontend, that the scheduler or the detokenizer works no more although its process lives.

Symbols (SGLang 0.5.23): `TokenizerManager.rid_to_state`, `.generate_request`; `SubprocessWatchdog._processes` and
`._names`. Reason: SGLang notices a process that has ended. A process that is stopped (SIGSTOP, a frozen control group)
or hangs (a deadlock, a disk that answers no more) leaves clients waiting without an answer, and SGLang's `/health`
stays green for 20 s. All times are monotonic: the wall clock may jump.

    stopped: the kernel says so of the process, twice.
    hangs:   requests wait, the engine has answered nothing for `SILENT_SECONDS`, then not even a request for one token,
             and no process's main thread has used the processor meanwhile.

A long batch and a training slice use the processor, so neither is a stall; nor is a process that computes for ever,
which SGLang's own watchdog ends after 300 s.

Of several ranks none can work without the others: once one of them has been stopped, or all have hung, for
`RANK_SECONDS`, the server ends. Ranks of other hosts count too: one that computes there is no stall here.

While the engine is stalled, `/health` and `/ready` answer 503 and new requests are refused with 503. After
`GRACE_SECONDS` the requests that wait end with the same error. The first message from the engine ends the stall.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from kt_runtime.sglang_patch.ranks.processes import RANK, Look, look_at

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
SILENT_SECONDS = 2.0  # without any message while requests wait; then one token is asked for
HUNG_SECONDS = 4.0  # without any message, also not about that token
GRACE_SECONDS = 10.0
RANK_SECONDS = 3.0
# Share of `HUNG_SECONDS` for which a main thread that works uses a processor, at least. A thread that only polls uses
# less; one that computes while fifty busy programs share two processors uses more.
BUSY_SHARE = 0.01


class EngineStalled(Exception):
    """Why requests end while the engine does not work."""


class Watched(Protocol):
    """The part of `FrontendManager` that is watched. `heard_at`: monotonic time of the engine's latest message."""

    heard_at: float

    def num_waiting(self) -> int:
        """Requests without their last token."""
        ...

    def ask_for_a_token(self) -> asyncio.Future[None]:
        """Sends a request that an idle scheduler answers at once; one that works leaves it out, and never answers it.
        It counts as waiting until it is answered or cancelled."""
        ...

    def end_waiting(self, error: Exception) -> None:
        """Ends all requests that wait, with status 503."""
        ...

    def end_server(self, why: str) -> None:
        """Ends all processes at once."""
        ...


class Stalls:
    """`processes`: name and process id of each. `reason`: why the engine is taken as stalled; empty while it works.

    `elsewhere`: ranks of other hosts, each named with its process and its host, as these hosts last saw them.
    """

    def __init__(
        self,
        manager: Watched,
        processes: Sequence[tuple[str, int]],
        look: Callable[[int], Look | None] = look_at,
        clock: Callable[[], float] = time.monotonic,
        elsewhere: Callable[[], Mapping[str, Look]] = dict,
    ) -> None:
        self.reason = ""
        self._has_ranks = any(name.startswith(RANK) for name, _ in processes)
        self._manager, self._look, self._clock, self._elsewhere = manager, look, clock, elsewhere
        self._processes = {f"{_named(name)} (process {pid})": pid for name, pid in processes}
        self._stalled_since = 0.0
        self._ended_requests = False
        self._stopped_before: set[str] = set()
        self._silent_since = 0.0
        self._main_seconds: dict[str, float] = {}
        self._probe: asyncio.Future[None] | None = None

    async def watch(self) -> None:
        """Runs until it is cancelled, in the frontend's event loop."""
        try:
            while True:
                await asyncio.sleep(POLL_SECONDS)
                self.check()
        finally:
            if self._probe is not None:
                self._probe.cancel()

    def check(self) -> None:
        """One look at everything. Sets or clears `reason`, and ends requests that have waited for too long."""
        now = self._clock()
        looks = {who: look for who, pid in self._processes.items() if (look := self._look(pid)) is not None}
        looks |= self._elsewhere()
        why = self._stopped(looks) or self._hung(looks, now)
        if why and not self.reason:
            logger.error("the server can't answer: %s", why)
            self._stalled_since, self._ended_requests = now, False
        elif self.reason and not why:
            logger.warning("the server answers again after %.0f s", now - self._stalled_since)
        self.reason = why
        if why and self._has_ranks and now - self._stalled_since >= RANK_SECONDS:
            self._manager.end_server(why)
        if why and not self._ended_requests and now - self._stalled_since >= GRACE_SECONDS:
            self._ended_requests = True
            self._manager.end_waiting(EngineStalled(why))

    def _stopped(self, looks: Mapping[str, Look]) -> str:
        """A debugger that reads a process's memory stops it for a moment only, so two looks must agree."""
        now_stopped = {who for who, look in looks.items() if look.stopped}
        agreed, self._stopped_before = now_stopped & self._stopped_before, now_stopped
        names = [who for who in looks if who in agreed]
        return f"{' and '.join(names)} {'are' if len(names) > 1 else 'is'} stopped by a signal" if names else ""

    def _hung(self, looks: Mapping[str, Look], now: float) -> str:
        heard = self._manager.heard_at > self._silent_since
        if heard and self._probe is not None:
            self._probe.cancel()  # it has no answer if the scheduler worked when it came, and would wait for ever
        nobody_waits = not self._manager.num_waiting() and not self.reason
        silent = now - self._silent_since
        used = max((look.main_seconds - self._main_seconds.get(who, 0.0) for who, look in looks.items()), default=0.0)
        if heard or nobody_waits or used > BUSY_SHARE * max(silent, HUNG_SECONDS):
            self._silent_since = now
            self._main_seconds = {who: look.main_seconds for who, look in looks.items()}
            return ""
        if silent >= SILENT_SECONDS and (self._probe is None or self._probe.done()):
            self._probe = self._manager.ask_for_a_token()
        names = " and ".join(dict.fromkeys((*self._processes, *looks)))
        return f"{names} compute nothing and have answered nothing for {silent:.0f} s" if silent >= HUNG_SECONDS else ""


def _named(process: str) -> str:
    return process if process.startswith(RANK) else f"the {process}"
