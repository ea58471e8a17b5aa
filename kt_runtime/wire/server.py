"""A server of the wire: a ROUTER socket on its own I/O thread. The thread that answers never waits for this thread.

The resident listens with this class, and so does the frontend, for moves of adapter names. The I/O thread reads and
checks messages, and answers some alone: malformed messages, retries, requests over the limits (backpressure). All other
requests wait for `take`; `answer` queues the reply and returns. Two event descriptors (eventfd(2)), one for each
direction, wake the other side.

No defence exists against a process of the same user that sends one message of endlessly many frames: libzmq collects a
whole message before it delivers any frame. Each frame is bounded.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import zmq

from kt_runtime.errors import InvalidValueError, KtError, NumericsError, RuntimeFault, ServerUnreachableError
from kt_runtime.files import exclusive_lock
from kt_runtime.wire import codec
from kt_runtime.wire.address import ipc_path, private_directory
from kt_runtime.wire.answers import Admission, AnswerBook
from kt_runtime.wire.codec import MEBIBYTE, Arrays, FrameError, Limits
from kt_runtime.wire.failures import error_reply
from kt_runtime.wire.messages import GetStatus, ListAdapters, Request
from kt_runtime.wire.replies import Reply

logger = logging.getLogger(__name__)

MAX_MESSAGES_PER_TURN = 64
READ_ONLY_KEPT = 64  # answers to read-only requests
LINGER_SECONDS = 5.0  # for `close`: how long peers may take to read their answers
HIGH_WATER_MARK = 64  # messages in libzmq's queue of one peer, in each direction

Decode = Callable[[Sequence[bytes], Limits], tuple[Any, dict[str, np.ndarray]]]
"""Frames and their limits -> a request and its arrays, or a ProtocolError."""

_Q = TypeVar("_Q", bound=Request)


@dataclass
class Incoming(Generic[_Q]):
    """A request that waits for its handler. `arrays`: read-only views, valid as long as this object lives."""

    request: _Q
    arrays: dict[str, np.ndarray]
    identity: bytes
    request_id: str
    answered: bool = field(default=False, repr=False)


class WireServer:
    """Listens at `address` from construction to `close`.

    ipc:// sockets have mode 0600 in a directory with mode 0700 (created if missing). A lock file next to the socket
    turns a second server into a ConflictError and allows reusing the socket of a dead server. `decode`: the codec's
    function for the requests of this server.

    Call `take`, `answer`, `wait`, `has_pending` and `close` from one thread; only `wait` and `close` block.
    """

    def __init__(
        self,
        address: str,
        *,
        decode: Decode = codec.decode_request,
        max_message_bytes: int = 256 * MEBIBYTE,
        answers_kept: int = 1024,
        answers_kept_bytes: int = 256 * MEBIBYTE,
        ids_kept: int = 16384,
        max_pending: int = 256,
        max_pending_bytes: int = 512 * MEBIBYTE,
    ) -> None:
        self._decode, self._limits = decode, Limits(max_message_bytes=max_message_bytes)
        bounds = {"ids_kept": ids_kept, "max_pending": max_pending, "max_pending_bytes": max_pending_bytes}
        self._book = AnswerBook(answers_kept=answers_kept, answers_kept_bytes=answers_kept_bytes, **bounds)
        # Separate from `_book`, so that frequent status requests evict no answers to trainers.
        self._read_only_book = AnswerBook(answers_kept=READ_ONLY_KEPT, answers_kept_bytes=MEBIBYTE, **bounds)
        self._pending: deque[Incoming] = deque()
        self._outbox: deque[tuple[Incoming, list[bytes]]] = deque()
        self._faults_logged: set[str] = set()
        self.on_arrival: Callable[[Incoming], None] | None = None
        """Called on the I/O thread for each request, before `take` returns it. Must not block."""
        self._closing = False
        self._linger_s = self._ends_s = 0.0  # duration and deadline of `close` waiting for peers
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(self._context.destroy, linger=0)
            self._wakeup, self._arrived = (self._eventfd(cleanup) for _ in range(2))
            self._router = self._open_router()
            cleanup.enter_context(_bind_ipc(self._router, address, self._send_what_is_left))
            self.address: str = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
            self._cleanup = cleanup.pop_all()
        self._thread = threading.Thread(target=self._run, name="kt-wire", daemon=True)
        self._thread.start()

    # For the thread that answers.

    @property
    def wakeup_fd(self) -> int:
        """A descriptor that polls readable while requests wait; `take` clears it."""
        return self._arrived

    @property
    def has_pending(self) -> bool:
        return bool(self._pending)

    def wait(self, timeout_s: float) -> bool:
        """Sleeps until a request waits or `timeout_s` has passed; returns whether one waits."""
        poller = select.poll()  # not select(2), which is limited to descriptors below 1,024
        poller.register(self._arrived, select.POLLIN)
        deadline = time.monotonic() + timeout_s
        while not self._pending and (left := deadline - time.monotonic()) > 0:
            poller.poll(left * 1000)
            if not self._pending:
                _drain(self._arrived)  # a stale event: its request was taken before the event was written
        return bool(self._pending)

    def take(self) -> list[Incoming]:
        """Removes and returns all waiting requests, in order of arrival. The caller must answer each exactly once."""
        _drain(self._arrived)
        return [self._pending.popleft() for _ in range(len(self._pending))]

    def answer(self, incoming: Incoming, reply: Reply, arrays: Arrays | None = None) -> None:
        """Sends `reply` to the latest sender of this request id, and keeps it for retries.

        The client gets a NumericsError in place of a reply with NaN or infinity. Raises RuntimeFault for a second
        reply, or for a reply to another id. After `close`, sends nothing: `close` has answered every request.
        """
        if incoming.answered or reply.request_id != incoming.request_id:
            problem = "was answered already" if incoming.answered else f"got a reply to {reply.request_id!r}"
            raise RuntimeFault(f"request {incoming.request_id!r} {problem}")
        incoming.answered = True
        if self._closing:
            return
        self._outbox.append((incoming, self._encode(reply, arrays)))
        os.eventfd_write(self._wakeup, 1)

    def _encode(self, reply: Reply, arrays: Arrays | None) -> list[bytes]:
        try:
            return codec.encode(reply, arrays, self._limits)
        except FrameError as error:
            kind = NumericsError if error.fault == "nonfinite" else RuntimeFault
            if kind is RuntimeFault:
                logger.error("wire server: the answer to %s can't be sent: %s", reply.request_id, error)
            return codec.encode(error_reply(reply.request_id, kind(f"the answer can't be sent: {error}")))

    def close(self, linger_s: float = LINGER_SECONDS) -> None:
        """Sends all queued answers, fails the other requests, closes the socket and removes its file.

        Requests without an answer get a ServerUnreachableError. `linger_s`: seconds to wait for slow peers, for all
        peers together.
        """
        if self._closing:
            return
        self._linger_s, self._ends_s = linger_s, time.monotonic() + linger_s
        self._closing = True
        os.eventfd_write(self._wakeup, 1)
        self._thread.join()
        self._cleanup.close()

    def _left_ms(self, kept_s: float = 0.0) -> int:
        """Milliseconds left of the linger, minus a reserve of `kept_s` seconds."""
        return max(0, int(1000 * (self._ends_s - kept_s - time.monotonic())))

    def _send_what_is_left(self) -> None:
        """Closes the sockets; libzmq keeps sending for the rest of the linger."""
        self._router.close(linger=self._left_ms())
        self._context.destroy(linger=0)

    def __enter__(self) -> WireServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Opening.

    @staticmethod
    def _eventfd(cleanup: contextlib.ExitStack) -> int:
        descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        cleanup.callback(os.close, descriptor)
        return descriptor

    def _open_router(self) -> zmq.Socket[bytes]:
        router = self._context.socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an undeliverable answer raises an error, which `_send` ignores
        router.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        router.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        # A frame of up to twice the limit gets an error reply; libzmq closes the connection on a larger one.
        router.setsockopt(zmq.MAXMSGSIZE, 2 * self._limits.max_message_bytes)
        return router

    # The I/O thread.

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wakeup, zmq.POLLIN)
        poller.register(self._router, zmq.POLLIN)
        while not self._closing:
            ready = dict(poller.poll())
            _drain(self._wakeup)
            try:
                self._send_outbox()
                if self._router in ready:
                    self._receive()
            except Exception:  # the thread must survive our own bugs: without it no trainer ever gets an answer
                logger.exception("wire server: unexpected error; the server continues")
        try:
            self._end()
        except Exception:
            logger.exception("wire server: unexpected error while closing; some answers were not sent")

    def _send_outbox(self) -> None:
        while self._outbox:
            incoming, frames = self._outbox.popleft()
            self._send(self._book_of(incoming.request).finish(incoming.request_id, frames), frames)

    def _end(self) -> None:
        """Sends all answers, and an error for each request that gets none, including messages not yet read."""
        self._send_outbox()
        self._receive()
        not_begun = {incoming.request_id for incoming in self._pending}
        for book in (self._book, self._read_only_book):
            for request_id, identity in book.abandon().items():
                state = "was not executed" if request_id in not_begun else "was not finished"
                error = ServerUnreachableError(
                    f"{self.address}: the server is shutting down; request {request_id!r} {state}"
                )
                self._send(identity, codec.encode(error_reply(request_id, error)))

    def _receive(self) -> None:
        for _ in range(MAX_MESSAGES_PER_TURN):
            try:
                identity = self._router.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            frames, fault = self._read_frames()
            try:
                if fault:
                    raise fault
                self._admit(identity, frames)
            except KtError as error:
                self._refuse(identity, error, _request_id(frames))

    def _read_frames(self) -> tuple[list[bytes], FrameError | None]:
        """Reads one message, without its identity. Beyond a limit, the rest of the message is read and dropped."""
        frames: list[bytes] = []
        num_frames = num_bytes = 0
        while self._router.getsockopt(zmq.RCVMORE):
            frame = self._router.recv()
            num_frames, num_bytes = num_frames + 1, num_bytes + len(frame)
            if num_frames <= self._limits.max_frames and num_bytes <= self._limits.max_message_bytes:
                frames.append(frame)
        if len(frames) == num_frames:
            return frames, None
        return frames, FrameError(
            "oversized",
            f"a message of {num_frames} frames and {num_bytes} bytes; allowed are {self._limits.max_frames} frames and "
            f"{self._limits.max_message_bytes} bytes",
        )

    def _admit(self, identity: bytes, frames: list[bytes]) -> None:
        request, arrays = self._decode(frames, self._limits)
        decision = self._book_of(request).admit(request.request_id, identity, frames)
        if isinstance(decision, list):
            self._send(identity, decision)
        elif decision is Admission.NEW:
            incoming = Incoming(request, arrays, identity, request.request_id)
            self._announce(incoming)
            self._pending.append(incoming)
            os.eventfd_write(self._arrived, 1)

    def _announce(self, incoming: Incoming) -> None:
        if self.on_arrival is None:
            return
        try:
            self.on_arrival(incoming)
        except Exception:  # the request must reach its handler, whatever becomes of what it could do ahead
            logger.exception("wire server: unexpected error on the arrival of %s", incoming.request_id)

    def _book_of(self, request: Request) -> AnswerBook:
        return self._read_only_book if isinstance(request, (GetStatus, ListAdapters)) else self._book

    def _refuse(self, identity: bytes, error: KtError, request_id: str) -> None:
        fault = error.fault if isinstance(error, FrameError) else type(error).__name__
        if fault not in self._faults_logged:
            self._faults_logged.add(fault)
            logger.warning("wire server: refused a message (%s, logged once): %r", fault, str(error))
        self._send(identity, codec.encode(error_reply(request_id, error)))

    def _send(self, identity: bytes, frames: list[bytes]) -> None:
        """Sends without blocking. An unreachable or slow client is no error: the client retries under the same id.

        While closing no client can retry, so the call then waits for a client whose queue is full.
        """
        try:
            if self._closing:
                self._router.setsockopt(zmq.SNDTIMEO, self._left_ms(self._linger_s / 2))  # reserves half for others
            self._router.send_multipart([identity, *frames], 0 if self._closing else zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.debug("wire server: an answer was not sent: %s", error)


def _request_id(frames: list[bytes]) -> str:
    return codec.request_id_of(frames[1]) if len(frames) > 1 and frames[0] == codec.MAGIC else ""


def _drain(descriptor: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.eventfd_read(descriptor)


@contextlib.contextmanager
def _bind_ipc(router: zmq.Socket[Any], address: str, close: Callable[[], None]) -> Iterator[None]:
    """Binds under a lock, with mode 0600 for the socket file; removes the stale file of a dead server.

    `close` closes the socket. libzmq then removes the socket file, so the lock must be held until after `close`.
    """
    path = ipc_path(address)
    private_directory(path.parent)
    with exclusive_lock(path.with_name(path.name + ".lock"), f"the address {address}"):
        _remove_stale_socket(path)
        mask = os.umask(0o177)
        try:
            router.bind(address)
        except zmq.ZMQError as error:
            raise InvalidValueError(f"address {address!r}: can't listen there: {error.strerror}") from None
        finally:
            os.umask(mask)
        path.chmod(0o600)
        yield
        close()
        path.unlink(missing_ok=True)


def _remove_stale_socket(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise InvalidValueError(f"socket {path}: exists and is not a socket; choose another address")
        path.unlink()
