"""Host 0: waits for the other hosts, compares them with itself, and ends the server with all of them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kt_runtime.errors import InvalidValueError, KtError, ProtocolError, RequestTimeoutError
from kt_runtime.ranks.failures import CUT_OFF, Failure
from kt_runtime.serve.hosts.facts import clock_problem, described, differences
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
    ProcessLook,
    Stream,
)
from kt_runtime.serve.hosts.place import HostPlace, listening

logger = logging.getLogger(__name__)

PROBE_FILE = ".hosts-"
"""Begins the name of the files by which other hosts recognise host 0's --adapter-dir and --finetuning-dir."""
USER_MISTAKE = 2


@dataclass
class _Other:
    """Another host. `here_s`, `answer`: host 0's clock in the middle of the question about the other's, and its answer.

    `heard_at`: monotonic time of its latest message."""

    hello: Hello
    stream: Stream
    here_s: float = 0.0
    answer: Answer | None = None
    heard_at: float = 0.0
    alive: Alive = field(default_factory=Alive)
    is_lost: bool = False

    @property
    def name(self) -> str:
        return f"host {self.hello.number} ({self.stream.peer})"


class Leader:
    """`facts`: of this host. `adapters`: the directory of adapters, which other hosts must see too. `jobs`: that of
    fine-tuning jobs, which they must see at the same path: each rank reads the checkpoint from which a job resumes.

    `leaving`: called, in the thread of the connections, when another host was asked to end.
    """

    def __init__(
        self,
        place: HostPlace,
        facts: Mapping[str, str],
        adapters: Path,
        clock: Callable[[], float] = time.time,
        join_s: float = JOIN_SECONDS,
        jobs: Path | None = None,
    ) -> None:
        self.shared = Shared()
        self.store: socket.socket | None = None
        self.leaving: Callable[[], None] = lambda: None
        self._place, self._facts, self._clock, self._join_s = place, facts, clock, join_s
        self._adapter_file = adapters / f"{PROBE_FILE}{secrets.token_hex(8)}"
        self._job_file: Path | None = None
        if jobs is not None and not jobs.resolve().is_relative_to(adapters.resolve()):
            self._job_file = jobs / self._adapter_file.name
        self._others: dict[int, _Other] = {}
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listening = listening(place)
        self._loop = Loop("hosts")

    def meet(self, say: Callable[[str], None]) -> Agreed:
        """Waits until all hosts are there and equal. Raises InvalidValueError, on all of them, where they differ;
        RequestTimeoutError if one does not come."""
        try:
            for file in self._probe_files():
                file.touch()
            return self._loop.call(self._meet(say))
        except KtError as error:
            self.end([str(error)], error.exit_status)
            raise
        finally:
            for file in self._probe_files():
                file.unlink(missing_ok=True)

    def _probe_files(self) -> list[Path]:
        return [self._adapter_file, *([] if self._job_file is None else [self._job_file])]

    def remote_looks(self) -> list[tuple[str, ProcessLook]]:
        """The ranks of other hosts, as these said within the last seconds, each with its host's name."""
        others = list(self._others.values())
        return [(other.name, look) for other in others for look in other.alive.processes]

    def end(self, lines: list[str], status: int) -> None:
        """Tells the others that the server ends, and waits until they have heard it. Once."""
        if not self.shared.ended.is_set():
            self.shared.end(lines, status)
            with contextlib.suppress(Exception):  # the server ends, whatever becomes of the message
                self._loop.call(self._end(lines, status), END_SECONDS)
            self._listening.close()
            if self.store is not None:
                self.store.close()
            self._loop.stop()

    async def _meet(self, say: Callable[[str], None]) -> Agreed:
        server = await asyncio.start_server(self._connected, sock=self._listening)
        say(f"host 0 of {self._place.count} listens at {self._place.text}")
        deadline = time.monotonic() + self._join_s
        while missing := [n for n in range(1, self._place.count) if not self._has_answered(n)]:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise RequestTimeoutError(
                    f"{_hosts(missing)} of {self._place.count} did not come to {self._place.text} within "
                    f"{self._join_s:g} s"
                )
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left_s)
            self._changed.clear()
        others = [self._others[number] for number in sorted(self._others)]
        if problems := self._problems(others):
            raise InvalidValueError(described(problems))
        self.store = listening(self._place, 0)
        addresses = [self._place.address, *(other.stream.peer for other in others)]
        agreed = Agreed(store_port=int(self.store.getsockname()[1]), addresses=addresses)
        for other in others:
            await other.stream.send(agreed)
            self._begin(self._beat(other))
        say(f"{self._place.count} hosts have the same versions, weights and options: {', '.join(addresses)}")
        del server  # still accepts connections, to tell a host too many that it is one
        return agreed

    def _has_answered(self, number: int) -> bool:
        other = self._others.get(number)
        return other is not None and other.answer is not None

    def _problems(self, others: list[_Other]) -> list[str]:
        problems = differences(self._facts, {other.name: other.hello.facts for other in others})
        for other in others:
            assert other.answer is not None
            if problem := clock_problem(other.name, other.here_s, other.answer.time_s):
                problems.append(problem)
            if not other.answer.has_adapter_file:
                problems.append(
                    f"--adapter-dir: host 0 has {self._adapter_file.parent}, {other.name} has "
                    f"{other.answer.adapter_directory}, which is another directory; hosts share one, as over NFS"
                )
            if not other.answer.has_job_file:
                assert self._job_file is not None
                problems.append(
                    f"--finetuning-dir: host 0 has {self._job_file.parent}, which {other.name} does not see; hosts "
                    "share one at the same path, or leave the option out: the jobs are in --adapter-dir then"
                )
        return problems

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, for as long as it lasts. Closed without an answer if it does not begin with a `Hello`."""
        stream = Stream(reader, writer)
        other: _Other | None = None
        try:
            hello = await stream.receive()
            if not isinstance(hello, Hello):
                return
            if refusal := self._refusal(hello, stream):
                await stream.send(End(lines=[refusal], status=USER_MISTAKE))
                return
            other = self._others[hello.number] = _Other(hello, stream, heard_at=time.monotonic())
            asked_s = self._clock()
            job_file = None if self._job_file is None else str(self._job_file)
            await stream.send(Ask(adapter_file=self._adapter_file.name, job_file=job_file))
            while True:
                message = await stream.receive()
                other.heard_at = time.monotonic()
                self._hear(other, message, asked_s)
        except (OSError, ProtocolError) as error:
            if other is not None:
                self._lost(other, error)
        finally:
            await stream.close()

    def _hear(self, other: _Other, message: object, asked_s: float) -> None:
        if isinstance(message, Answer):
            other.here_s, other.answer = (asked_s + self._clock()) / 2, message
            self._changed.set()
        elif isinstance(message, Alive):
            other.alive = message
        elif isinstance(message, Failed):
            self.shared.fail(message.failure())
        elif isinstance(message, Leaving):
            logger.info("%s was asked to end", other.name)
            self.leaving()

    def _refusal(self, hello: Hello, stream: Stream) -> str:
        if not 0 < hello.number < self._place.count:
            return f"--node-rank {hello.number}: host 0 has --nnodes {self._place.count}"
        if hello.number in self._others:
            return f"--node-rank {hello.number}: {self._others[hello.number].stream.peer} has it already"
        return ""

    def _lost(self, other: _Other, error: Exception) -> None:
        """Before the agreement a host may connect again. Afterwards the server fails: ranks need all hosts."""
        if self.store is None:
            self._others.pop(other.hello.number, None)
        elif not self.shared.ended.is_set():
            other.is_lost = True
            self.shared.fail(Failure(lost(other.name, error), CUT_OFF))

    async def _beat(self, other: _Other) -> None:
        """Sends a sign of life each second, and notices a host that sends none."""
        other.heard_at = time.monotonic()
        with contextlib.suppress(OSError):
            while not self.shared.ended.is_set():
                await other.stream.send(Alive(has_ranks=self.shared.looks is not None))
                await asyncio.sleep(BEAT_SECONDS)
                silent_s = time.monotonic() - other.heard_at
                patience_s = SILENT_SECONDS if other.alive.has_ranks else SILENT_BEFORE_RANKS_SECONDS
                if silent_s > patience_s:
                    self.shared.fail(Failure(silent(other.name, silent_s), CUT_OFF))
                    return

    async def _end(self, lines: list[str], status: int) -> None:
        for other in [each for each in self._others.values() if not each.is_lost]:
            with contextlib.suppress(OSError):
                await other.stream.send(End(lines=lines, status=status))
                await other.stream.close()

    def _begin(self, work: object) -> None:
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def lost(name: str, error: Exception) -> str:
    """Why a connection has ended. The kernel gives it up where the other end acknowledges nothing."""
    if isinstance(error, OSError) and error.errno in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH):
        return f"{name} is cut off: it can't be reached any longer"
    return f"{name} has gone: {error}"


def silent(name: str, seconds: float) -> str:
    return f"{name} has given no sign of life for {seconds:.0f} s"


def _hosts(numbers: list[int]) -> str:
    return f"{'hosts' if len(numbers) > 1 else 'host'} {', '.join(map(str, numbers))}"
