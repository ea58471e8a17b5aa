"""A host other than host 0: says what it has, waits for the agreement, and ends when the server ends."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from kt_runtime.errors import InvalidValueError, ProtocolError, RequestTimeoutError, RuntimeFault
from kt_runtime.ranks.failures import CUT_OFF, Failure
from kt_runtime.serve.hosts.leader import USER_MISTAKE, lost, silent
from kt_runtime.serve.hosts.loop import (
    BEAT_SECONDS,
    END_SECONDS,
    JOIN_SECONDS,
    SILENT_BEFORE_RANKS_SECONDS,
    SILENT_SECONDS,
    Loop,
    Shared,
)
from kt_runtime.serve.hosts.messages import (
    Agreed,
    Alive,
    Answer,
    Ask,
    End,
    Failed,
    Hello,
    Leaving,
    Message,
    Stream,
    connected,
)
from kt_runtime.serve.hosts.place import HostPlace

RETRY_SECONDS = 0.5


class Follower:
    """`facts`: of this host. `adapters`: its directory of adapters, which must be host 0's.

    `own_address`: this host's address in the connection to host 0, once connected.
    """

    def __init__(
        self,
        place: HostPlace,
        facts: Mapping[str, str],
        adapters: Path,
        clock: Callable[[], float] = time.time,
        join_s: float = JOIN_SECONDS,
    ) -> None:
        self.shared = Shared()
        self.own_address = ""
        self._place, self._facts, self._adapters = place, dict(facts), adapters
        self._clock, self._join_s = clock, join_s
        self._stream: Stream | None = None
        self._heard_at = 0.0
        self._leader_has_ranks = False
        self._tasks: list[asyncio.Task[None]] = []
        self._loop = Loop("hosts")

    @property
    def leader(self) -> str:
        return f"host 0 ({self._place.address})"

    def meet(self, say: Callable[[str], None]) -> Agreed:
        """Waits for host 0 and for the agreement. Raises InvalidValueError where the hosts differ, RequestTimeoutError
        if host 0 is not there, RuntimeFault if it ends."""
        say(f"host {self._place.number} of {self._place.count} looks for host 0 at {self._place.text}")
        return self._loop.call(self._meet(say))

    def report(self, failure: Failure) -> None:
        """Tells host 0 that this host's ranks have failed. Host 0 then tells all hosts why the server ends."""
        self._send(Failed(why=failure.why, kind=failure.kind, status=failure.status))

    def leave(self) -> None:
        """Asks host 0 to end the server in order."""
        self._send(Leaving())

    def close(self) -> None:
        if self._stream is not None:
            with contextlib.suppress(Exception):
                self._loop.call(self._stream.close(), END_SECONDS)
        self._loop.stop()

    def _send(self, message: Message) -> None:
        if self._stream is not None:
            with contextlib.suppress(Exception):  # host 0 has gone, which is a failure of its own
                self._loop.call(self._stream.send(message), END_SECONDS)

    async def _meet(self, say: Callable[[str], None]) -> Agreed:
        deadline = time.monotonic() + self._join_s
        why = ""
        while time.monotonic() < deadline:
            try:
                async with asyncio.timeout_at(asyncio.get_running_loop().time() + deadline - time.monotonic()):
                    self._stream = await connected(self._place.address, self._place.port)
                    return await self._agree(self._stream, say)
            except (TimeoutError, OSError) as error:  # not there yet, or it begins anew
                why = f" ({error})" if str(error) else ""
                await asyncio.sleep(RETRY_SECONDS)
        raise RequestTimeoutError(
            f"host 0 has not agreed at --dist-init-addr {self._place.text} within {self._join_s:g} s{why}"
        )

    async def _agree(self, stream: Stream, say: Callable[[str], None]) -> Agreed:
        await stream.send(Hello(number=self._place.number, facts=self._facts))
        while True:
            match await stream.receive():
                case Ask() as asked:
                    say(f"connected with {self.leader}; waiting until all {self._place.count} hosts are there")
                    seen = (self._adapters / Path(asked.adapter_file).name).exists()
                    await stream.send(
                        Answer(
                            time_s=self._clock(),
                            has_adapter_file=seen,
                            adapter_directory=str(self._adapters),
                            has_job_file=asked.job_file is None or Path(asked.job_file).exists(),
                        )
                    )
                case Agreed() as agreed:
                    self.own_address = stream.own
                    self._heard_at = time.monotonic()
                    self._tasks = [asyncio.ensure_future(work) for work in (self._listen(stream), self._beat(stream))]
                    return agreed
                case End() as end:
                    kind = InvalidValueError if end.status == USER_MISTAKE else RuntimeFault
                    raise kind("; ".join(end.lines) or "host 0 has ended")

    async def _listen(self, stream: Stream) -> None:
        try:
            while True:
                message = await stream.receive()
                self._heard_at = time.monotonic()
                if isinstance(message, End):
                    self.shared.end(message.lines, message.status)
                    return
                if isinstance(message, Alive):
                    self._leader_has_ranks = message.has_ranks
        except (OSError, ProtocolError) as error:
            self.shared.fail(Failure(lost(self.leader, error), CUT_OFF))

    async def _beat(self, stream: Stream) -> None:
        with contextlib.suppress(OSError):
            while not self.shared.ended.is_set():
                looks = self.shared.own_looks()
                await stream.send(Alive(has_ranks=self.shared.looks is not None, processes=looks))
                await asyncio.sleep(BEAT_SECONDS)
                silent_s = time.monotonic() - self._heard_at
                if silent_s > (SILENT_SECONDS if self._leader_has_ranks else SILENT_BEFORE_RANKS_SECONDS):
                    self.shared.fail(Failure(silent(self.leader, silent_s), CUT_OFF))
                    return
