"""The scheduler's side of grammars: xgrammar's classes, with the work in other processes.

`GrammarCompiler` and `GrammarMatcher` here have the methods of xgrammar 0.2.7's classes that SGLang 0.5.23's backend
(`sglang.srt.constrained.xgrammar_backend`) calls; `backend.py` installs them. Each grammar has its own process
(`process.py`): the kernel limits its CPU time and memory, and ending the process cancels its work. xgrammar itself
can't cancel work.

Compiling in another process and transferring the result is no alternative: `CompiledGrammar.serialize_json` grows with
the square of the rules. A schema of 500 optional properties compiles in 0.03 s to 2 MB and needs more than 2 GB to be
serialized. Matching needs a limit too: the 14 characters `(([a-z]*)*)*!` compile immediately and take 8 s for one mask.

The masks of a batch are requested together, and the scheduler's wait for them is bounded (`step.py`). A matcher whose
process has ended refuses every token (ValueError, after which SGLang ends this request) and leaves the mask unchanged.
"""

from __future__ import annotations

import array
import collections
import contextlib
import contextvars
import ctypes
import itertools
import json
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import Any

from kt_runtime.sglang_patch.grammar.allowance import MIB, GrammarLimits
from kt_runtime.sglang_patch.grammar.process import (
    ACCEPT,
    CLOSE,
    COMPILE,
    HEAD,
    JUMP,
    MASK,
    MAX_MESSAGE_BYTES,
    OPEN,
    PID,
    ROLLBACK,
    STATE,
    TEXT,
)
from kt_runtime.sglang_patch.grammar.step import TRY_LATER, Answer, Failure, Patience

logger = logging.getLogger(__name__)

PROGRAM = "kt_runtime.sglang_patch.grammar.process"
START_SECONDS = 60.0
TOO_MUCH = "took more time or memory than allowed"


class GrammarError(RuntimeError):
    """A RuntimeError, because SGLang's backend answers a RuntimeError of the compiler with status 400."""


class Cancellation:
    """Ends the process of a grammar without waiting requests, even if the process starts after `cancel`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._end: Callable[[], None] | None = None
        self.cancelled = False

    def cancel(self) -> None:
        with self._lock:
            self.cancelled = True
            end = self._end
        if end is not None:
            end()

    @contextlib.contextmanager
    def ends(self, end: Callable[[], None]) -> Iterator[None]:
        with self._lock:
            self._end = end
            cancelled = self.cancelled
        try:
            if cancelled:
                end()
            yield
        finally:
            with self._lock:
                self._end = None


current_cancellation: contextvars.ContextVar[Cancellation | None] = contextvars.ContextVar("cancellation", default=None)


class GrammarProcess:
    """The parent's end of one grammar's process. Used by one thread at a time, except for `end`."""

    def __init__(self, connection: socket.socket) -> None:
        """Raises GrammarError if the process does not send its process id."""
        self.connection = connection
        self.private_bytes = 0
        self.failure: Failure | None = None
        self.unanswered: collections.deque[Answer] = collections.deque()  # in the order of the questions
        self.num_asked = 0  # questions since the last time that all were answered
        self._cpu_before_s = 0.0
        self._lock = threading.Lock()
        self._pidfd = -1
        connection.settimeout(START_SECONDS)
        try:
            self.pid = PID.unpack(connection.recv(PID.size))[0]
            self._pidfd = os.pidfd_open(self.pid)
            self._cpu_clock = cpu_clock_of(self.pid)
        except (OSError, struct.error) as error:
            self.end()
            connection.close()
            raise GrammarError(f"the process for it did not start{TRY_LATER}") from error

    @property
    def ended(self) -> bool:
        return self._pidfd < 0

    def send(self, message: bytes) -> None:
        """Raises GrammarError when the process has ended."""
        try:
            self.connection.send(message)
        except OSError:
            raise self._ended() from None

    def ask(self, message: bytes, wait_s: float) -> bytes:
        """Raises GrammarError if the process has ended or does not answer within `wait_s`; a timeout ends it."""
        try:
            self.connection.settimeout(wait_s)
            self.connection.send(message)
            answer = self.connection.recv(MAX_MESSAGE_BYTES)
        except TimeoutError:
            self.fail(Failure(f"was not done within {wait_s:g} s{TRY_LATER}", is_busy=True))
            raise GrammarError(self.reason) from None
        except OSError:
            raise self._ended() from None
        if not answer:
            raise self._ended()
        return answer

    def ask_later(self, message: bytes) -> Answer:
        """Sends a question of the scheduler's thread; `Patience.collect` waits for the answer. Raises GrammarError."""
        if not self.unanswered:
            self.num_asked, self._cpu_before_s = 0, self._cpu_s()
        self.send(message)
        self.num_asked += 1
        self.unanswered.append(Answer())
        return self.unanswered[-1]

    def take_answer(self) -> None:
        """Receives an answer from a socket that is readable: it has an answer, or has been closed."""
        try:
            data = self.connection.recv(MAX_MESSAGE_BYTES)
        except OSError:
            data = b""
        if data:
            self.unanswered.popleft().data = data
        else:
            self.fail(Failure(TOO_MUCH, is_lasting=True))

    def used_cpu_s(self) -> float:
        """CPU time in seconds since the oldest unanswered question was sent."""
        return self._cpu_s() - self._cpu_before_s

    def _cpu_s(self) -> float:
        try:
            return time.clock_gettime(self._cpu_clock)
        except OSError:  # the process has ended
            return 0.0

    def fail(self, failure: Failure) -> None:
        """Ends the process, and with it the requests that use its grammar."""
        self.end()
        self.failure = self.failure or failure
        self.unanswered.clear()

    def _ended(self) -> GrammarError:
        cancelled = self.ended and self.failure is None
        self.fail(Failure("was cancelled" if cancelled else TOO_MUCH, is_lasting=not cancelled))
        return GrammarError(self.reason)

    @property
    def reason(self) -> str:
        return self.failure.reason if self.failure is not None else "has ended"

    def end(self) -> None:
        """Kills the process immediately, also while it computes. May be called in any thread, more than once."""
        with self._lock:
            pidfd, self._pidfd = self._pidfd, -1
        if pidfd >= 0:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
            self.connection.close()


def cpu_clock_of(pid: int) -> int:
    """The id of the clock that counts a process's CPU time, for `time.clock_gettime`. Raises OSError."""
    clock = ctypes.c_int()
    error = ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock))
    if error:
        raise OSError(error, os.strerror(error))
    return clock.value


class GrammarForker:
    """The process that holds the vocabulary and forks one process per grammar. It starts with the first grammar and
    restarts if it was ended. It ends with this process, because its socket closes then."""

    def __init__(self, vocabulary: Callable[[], str]) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._program: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def fork(self) -> GrammarProcess:
        """Raises GrammarError when no process can be started."""
        with self._lock:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                try:
                    self._send(theirs)
                except OSError:  # the forker was ended
                    self._stop()
                    self._send(theirs)
            except (OSError, ValueError, struct.error) as error:
                ours.close()
                self._stop()
                raise GrammarError(f"the process that compiles grammars does not start: {error}{TRY_LATER}") from error
            finally:
                theirs.close()
        return GrammarProcess(ours)

    def stop(self) -> None:
        with self._lock:
            self._stop()

    @property
    def pid(self) -> int | None:
        return self._program.pid if self._program is not None else None

    def _send(self, end: socket.socket) -> None:
        if self._control is None:
            self._start()
        assert self._control is not None
        socket.send_fds(self._control, [b"f"], [end.fileno()])

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        vocabulary = os.memfd_create("vocabulary")
        try:
            with os.fdopen(os.dup(vocabulary), "wb") as file:
                file.write(self._vocabulary().encode())
            os.lseek(vocabulary, 0, os.SEEK_SET)
            files = (theirs.fileno(), vocabulary)
            self._program = subprocess.Popen(
                [sys.executable, "-m", PROGRAM, *map(str, files)],
                pass_fds=files,
                stdin=subprocess.DEVNULL,
                # NumPy's threads would not survive the fork, and each would reserve address space.
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"},
            )
        finally:
            theirs.close()
            os.close(vocabulary)
        ours.settimeout(START_SECONDS)
        PID.unpack(ours.recv(PID.size) or b"\0" * PID.size)
        self._control = ours

    def _stop(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._program is not None:
            self._program.kill()
            self._program.wait()
        self._control = self._program = None


class Room:
    """Bounds the number of live grammars and their bytes. `evict` drops a cached grammar and returns whether there was
    one."""

    def __init__(self, limits: GrammarLimits) -> None:
        self.limits = limits
        self.patience = Patience()
        self.evict: Callable[[], bool] = lambda: False
        self._live: set[GrammarProcess] = set()
        self._num_starting = 0
        self._changed = threading.Condition()

    @property
    def live(self) -> list[GrammarProcess]:
        with self._changed:
            return list(self._live)

    @contextlib.contextmanager
    def starting(self, cancellation: Cancellation | None) -> Iterator[None]:
        """Waits for room. Raises GrammarError if there is none after `limits.room_s`, or after a cancellation."""
        deadline = time.monotonic() + self.limits.room_s
        while not self._take():
            if self.evict():
                continue
            if time.monotonic() > deadline or (cancellation is not None and cancellation.cancelled):
                used = sum(process.private_bytes for process in self.live)
                raise GrammarError(
                    f"{len(self.live)} grammars of {used // MIB} MiB are in use; allowed at once are "
                    f"{self.limits.max_processes} of {self.limits.max_bytes // MIB} MiB{TRY_LATER}"
                )
            with self._changed:
                self._changed.wait(0.1)
        try:
            yield
        finally:
            with self._changed:
                self._num_starting -= 1
                self._changed.notify_all()

    def _take(self) -> bool:
        with self._changed:
            living = [process for process in self._live if not process.ended]
            used = sum(process.private_bytes for process in living)
            if len(living) + self._num_starting >= self.limits.max_processes or used > self.limits.max_bytes:
                return False
            self._num_starting += 1
            return True

    def add(self, process: GrammarProcess) -> None:
        with self._changed:
            self._live.add(process)

    def remove(self, process: GrammarProcess) -> None:
        process.end()
        with self._changed:
            self._live.discard(process)
            self._changed.notify_all()


class CompiledGrammar:
    """Replaces xgrammar's class. Its process ends once neither a matcher nor the cache refers to the grammar."""

    def __init__(self, process: GrammarProcess, room: Room) -> None:
        self.process, self.limits, self.patience = process, room.limits, room.patience
        self.numbers = itertools.count(1)
        self.closed: collections.deque[int] = collections.deque()  # numbers of matchers that the process may drop
        process.connection.settimeout(room.limits.wait_s)
        room.add(process)
        weakref.finalize(self, room.remove, process)

    @property
    def memory_size_bytes(self) -> int:
        return self.process.private_bytes

    @property
    def grammar(self) -> str:
        """The grammar as EBNF. xgrammar's property returns an object that `str` converts to this text."""
        return self.process.ask(bytes([TEXT]), self.limits.wait_s)[1:].decode()

    def drop_closed(self) -> None:
        while self.closed:
            self.process.send(HEAD.pack(CLOSE, self.closed.popleft(), 0))


class GrammarCompiler:
    """Replaces xgrammar's class. Compiling raises GrammarError, a RuntimeError, with the reason."""

    room = Room(GrammarLimits())

    def __init__(self, tokenizer_info: Any, **_options: Any) -> None:
        """Ignores the options: they configure xgrammar's threads and cache, which are not used."""
        self.forker = GrammarForker(lambda: str(tokenizer_info.serialize_json()))

    def compile_json_schema(
        self, schema: str, *, any_whitespace: bool = True, max_whitespace_cnt: int | None = None
    ) -> CompiledGrammar:
        return self._compile("json", schema, any_whitespace=any_whitespace, max_whitespace_cnt=max_whitespace_cnt)

    def compile_builtin_json_grammar(self) -> CompiledGrammar:
        return self._compile("any_json", "")

    def compile_regex(self, regex: str) -> CompiledGrammar:
        return self._compile("regex", regex)

    def compile_grammar(self, ebnf: str) -> CompiledGrammar:
        return self._compile("ebnf", ebnf)

    def compile_structural_tag(self, structural_tag: Any) -> CompiledGrammar:
        """Takes JSON, or xgrammar's StructuralTag."""
        text = structural_tag if isinstance(structural_tag, str) else structural_tag.model_dump_json()
        return self._compile("structural_tag", text)

    def clear_cache(self) -> None:
        """Does nothing: this class has no cache."""

    def _compile(self, kind: str, spec: str, **options: Any) -> CompiledGrammar:
        limits, cancellation = self.room.limits, current_cancellation.get()
        order = {
            "kind": kind,
            "spec": spec,
            "options": options,
            "limits": asdict(limits),
        }
        message = bytes([COMPILE]) + json.dumps(order).encode()
        if len(message) > MAX_MESSAGE_BYTES:
            raise GrammarError(f"it has {len(message)} bytes; allowed are {MAX_MESSAGE_BYTES}")
        with self.room.starting(cancellation):
            process = self.forker.fork()
            with (cancellation or Cancellation()).ends(process.end):
                try:
                    answer = json.loads(process.ask(message, limits.compile_wait_s))
                except GrammarError as error:
                    raise GrammarError(f"compiling it {error}{what_may_be(process, limits)}") from None
            if "error" in answer:
                process.end()
                raise GrammarError(answer["error"])
            process.private_bytes = answer["bytes"]
            return CompiledGrammar(process, self.room)


def what_may_be(process: GrammarProcess, limits: GrammarLimits) -> str:
    if process.failure is None or not process.failure.is_lasting:
        return ""
    return f": {limits.compile_cpu_s:g} s of processor time and {limits.compile_bytes // MIB} MiB"


class GrammarMatcher:
    """Replaces xgrammar's class. Used by the scheduler's thread. The grammar's process creates the matcher at its first
    question, so that queued requests cost nothing."""

    def __init__(
        self, compiled: CompiledGrammar, *, max_rollback_tokens: int, override_stop_tokens: Any = None
    ) -> None:
        self.compiled, self.number = compiled, next(compiled.numbers)
        self._max_rollback_tokens, self._is_open, self._terminated = max_rollback_tokens, False, False
        self._stop_token_ids = (
            [override_stop_tokens] if isinstance(override_stop_tokens, int) else override_stop_tokens or ()
        )
        self._mask: Answer | None = None  # the current state's mask, once requested

    def accept_token(self, token: int) -> bool:
        """Raises ValueError when the grammar's process has ended."""
        try:
            accepted, terminated = STATE.unpack(self._answer(self._ask(ACCEPT, token)))
        except GrammarError as error:
            raise ValueError(f"matching the grammar {error}") from None
        self._mask, self._terminated = None, bool(terminated)
        return bool(accepted)

    def ask_for_mask(self) -> None:
        """Requests the mask, so that the process computes it while the scheduler does other work."""
        if self._mask is None:
            with contextlib.suppress(GrammarError):  # accepting the request's next token reports it
                self._mask = self._ask(MASK, 0)

    def fill_next_token_bitmask(self, bitmask: Any, row: int = 0) -> bool:
        """`bitmask`: int32, one row of bits per request. If the grammar's process has ended, the row is unchanged."""
        import torch

        try:
            self._mask = self._mask or self._ask(MASK, 0)
            mask = self._answer(self._mask)
        except GrammarError as error:
            logger.warning("a grammar's mask is missing, its request ends with its next token: it %s", error)
            return False
        words = torch.frombuffer(bytearray(mask), dtype=torch.int32)
        bitmask[row, : len(words)] = words
        return True

    def is_terminated(self) -> bool:
        return self._terminated

    def rollback(self, num_tokens: int) -> None:
        self._mask = None
        with contextlib.suppress(GrammarError):
            answer = self._answer(self._ask(ROLLBACK, num_tokens))
            self._terminated = bool(STATE.unpack(answer)[1])

    def find_jump_forward_string(self) -> str:
        try:
            return self._answer(self._ask(JUMP, 0))[1:].decode()
        except GrammarError:
            return ""

    def _ask(self, kind: int, argument: int) -> Answer:
        """Raises GrammarError when the process has ended."""
        compiled = self.compiled
        compiled.drop_closed()
        if not self._is_open:
            head = HEAD.pack(OPEN, self.number, self._max_rollback_tokens)
            compiled.process.send(head + array.array("i", self._stop_token_ids).tobytes())
            self._is_open = True
            weakref.finalize(self, compiled.closed.append, self.number)
        return compiled.process.ask_later(HEAD.pack(kind, self.number, argument))

    def _answer(self, answer: Answer) -> bytes:
        """Raises GrammarError when the process has ended."""
        compiled = self.compiled
        if answer.data is None:
            compiled.patience.collect([compiled.process], compiled.limits)
        if answer.data is None:
            raise GrammarError(compiled.process.reason)
        return answer.data


def collect_masks(matchers: Iterable[GrammarMatcher]) -> None:
    """Requests all masks before it waits for any. A process that has not answered afterwards has ended."""
    late: list[GrammarMatcher] = []
    for matcher in matchers:
        matcher.ask_for_mask()
        late.append(matcher)
    if late:
        compiled = late[0].compiled
        compiled.patience.collect([matcher.compiled.process for matcher in late], compiled.limits)
