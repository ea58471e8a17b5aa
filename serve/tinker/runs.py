"""One model of a Tinker client: its calls, executed one after the other in the order of their `seq_id`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from kt_runtime.errors import InvalidValueError, KtError
from kt_runtime.serve.tinker.checkpoints import RunRecord
from kt_runtime.serve.tinker.futures import Failure, Future, Futures
from kt_runtime.serve.tinker.order import CallOrder
from kt_runtime.serve.tinker.protocol.results import Result
from kt_runtime.serve.tinker.training import Training

logger = logging.getLogger(__name__)

LOOK_SECONDS = 30.0  # how often a gap in the order is looked at
CLOSE_SECONDS = 60.0

Work = Callable[[], Awaitable[Result]]


@dataclass(frozen=True)
class _Call:
    future: Future
    work: Work


async def outcome_of(work: Awaitable[Result], what: str) -> Result | Failure:
    """The result, or the error as clients see it. An unexpected error is logged."""
    try:
        return await work
    except KtError as error:
        return Failure.of(error)
    except Exception as error:  # the boundary: a bug becomes a failed future and a log entry
        logger.exception("%s failed", what)
        return Failure(f"unexpected {type(error).__name__}; the server's log has it", "server")


class TrainingRun:
    """`owner`: the client's session. Calls are taken as soon as the run exists, and executed once it is open.

    `pinned`: aliases of the run's frozen samplers; `named`: adapters that it saved under a name; the oldest first.
    """

    def __init__(
        self,
        record: RunRecord,
        owner: str,
        training: Training,
        futures: Futures,
        order: CallOrder[Any] | None = None,
    ) -> None:
        self.record, self.owner, self.training = record, owner, training
        self.used_at = time.time()
        self.pinned: list[str] = []
        self.named: list[str] = []
        self.publishes_latest = False
        self._futures = futures
        self._order: CallOrder[_Call] = CallOrder() if order is None else order
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._opening: asyncio.Task[Result | Failure] | None = None
        self._current: list[Future] = []

    @property
    def run_id(self) -> str:
        return self.record.run_id

    def start(self, opening: Coroutine[Any, Any, Result], opened: Future, failed: Callable[[], None]) -> None:
        """Opens the run, then executes its calls. `failed` is called if it can't be opened."""
        self._task = asyncio.create_task(self._work(opening, opened, failed))

    def submit(self, seq_id: int | None, num_bytes: int, work: Work) -> Future:
        """The call's future; a resent call gets the future that it has. Raises the errors of `CallOrder.check`."""
        self.used_at = time.time()
        if seq_id is not None and (known := self._futures.known(self._key(seq_id))) is not None:
            return known
        place = self._order.check(seq_id, num_bytes)
        future = self._futures.open(self._key(place), self.owner)
        self._order.put(place, _Call(future, work), num_bytes)
        self._wake.set()
        return future

    def cancel(self) -> None:
        for task in (self._task, self._opening):
            if task is not None:
                task.cancel()

    async def end(self, failure: Failure) -> None:
        """Frees the session in the resident; unfinished calls end with `failure`."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for future in [*self._current, *(call.future for call in self._order.drain())]:
            self._futures.finish(future, failure)
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                # The resident may still be opening the session; it could not be closed before.
                if self._opening is not None and not isinstance(await asyncio.shield(self._opening), Failure):
                    await self.training.close()
        except (KtError, TimeoutError) as error:
            logger.warning("run %s: its training session was not closed: %s", self.run_id, error)

    def _key(self, place: int) -> tuple[str, str, int]:
        return ("call", self.run_id, place)

    async def _work(self, opening: Coroutine[Any, Any, Result], opened: Future, failed: Callable[[], None]) -> None:
        self._current = [opened]
        self._opening = asyncio.create_task(outcome_of(opening, f"run {self.run_id}"))
        outcome = await asyncio.shield(self._opening)
        if isinstance(outcome, Failure):
            failed()
            for call in self._order.drain():
                self._futures.finish(call.future, outcome)
        self._futures.finish(opened, outcome)
        while not isinstance(outcome, Failure):
            following = self._order.take()
            if following is None:
                await self._wait()
            else:
                self._current = [following.future]
                result = await outcome_of(following.work(), f"a call of run {self.run_id}")
                self._futures.finish(following.future, result)

    async def _wait(self) -> None:
        missing, lost = self._order.given_up()
        for call in lost:
            error = InvalidValueError(f"call {missing} of this run never arrived, so this later one was not executed")
            self._futures.finish(call.future, Failure.of(error))
        self._wake.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_SECONDS):
                await self._wake.wait()
