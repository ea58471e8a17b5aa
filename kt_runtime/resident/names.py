"""The resident's requests to the frontend: move an adapter's name to another version.

No call blocks: the scheduler calls `send` and `poll` between two batches. The other end is `serve/http/names.py`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any

import zmq

from kt_runtime.errors import (
    ConflictError,
    KtError,
    ProtocolError,
    RequestTimeoutError,
    ServerUnreachableError,
    UserError,
)
from kt_runtime.wire import codec
from kt_runtime.wire.codec import Limits
from kt_runtime.wire.failures import error_from
from kt_runtime.wire.messages import MoveName
from kt_runtime.wire.replies import ErrorReply
from kt_runtime.wire.ticket import open_dealer

Done = Callable[[Exception | None], None]

TIMEOUT_SECONDS = 60.0
GRACE_SECONDS = 5.0  # the frontend rejects moves after the timeout; its last answers arrive within this time
LIMITS = Limits(max_message_bytes=64 * 1024)


class NamesChannel:
    """One connection to the frontend at `address` (ipc://); the frontend may start to listen later.

    Not thread-safe. `done(None)`: the name has moved; `done(error)`: it has not and will not. `poll` calls `done`,
    exactly once for each `send`, except for moves that are still open at `close`.
    """

    def __init__(self, address: str, *, timeout_s: float = TIMEOUT_SECONDS, grace_s: float = GRACE_SECONDS) -> None:
        self.address, self.timeout_s, self.grace_s = address, timeout_s, grace_s
        self._waiting: dict[str, tuple[MoveName, Done]] = {}
        self._failed_at_once: list[tuple[Done, Exception]] = []
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = open_dealer(self._context, address, LIMITS)

    @property
    def socket(self) -> zmq.Socket[Any]:
        """For polling only: when the socket is readable, call `poll`. Only `poll` may receive from it."""
        return self._socket

    def send(self, name: str, version: str, lora_id: str, done: Done) -> None:
        move = MoveName(
            request_id=secrets.token_hex(8),
            name=name,
            adapter_version=version,
            lora_id=lora_id,
            expires_at=time.monotonic() + self.timeout_s,
        )
        try:
            self._socket.send_multipart(codec.encode(move, limits=LIMITS), zmq.NOBLOCK)
        except zmq.Again:
            problem = ServerUnreachableError(f"{self.address}: the frontend takes no more messages; is it running?")
            self._failed_at_once.append((done, problem))
            return
        self._waiting[move.request_id] = (move, done)

    def wait(self, seconds: float) -> None:
        """Sleeps until an answer can be polled, at most `seconds`. Returns at once if no move is open."""
        if self._waiting:
            self._socket.poll(int(1000 * seconds))

    def poll(self) -> None:
        """Calls `done` of every move that has succeeded, failed or timed out."""
        failed, self._failed_at_once = self._failed_at_once, []
        for done, problem in failed:
            done(problem)
        while self._waiting and self._socket.poll(0):
            self._receive()
        now = time.monotonic()
        for move, done in list(self._waiting.values()):
            if now > move.expires_at + self.grace_s:
                del self._waiting[move.request_id]
                done(RequestTimeoutError(f"the frontend did not move {move.name!r} within {self.timeout_s:g} s"))

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _receive(self) -> None:
        try:
            reply, _ = codec.decode_reply(self._socket.recv_multipart(), LIMITS)
        except ProtocolError:
            return  # malformed, so not from the frontend; an unanswered move times out
        move, done = self._waiting.pop(reply.request_id, (None, None))
        if move is not None and done is not None:
            done(_error(move, reply) if isinstance(reply, ErrorReply) else None)


def _error(move: MoveName, reply: ErrorReply) -> KtError:
    error = error_from(reply)
    return ConflictError(f"adapter {move.name!r} was not moved: {error}") if isinstance(error, UserError) else error
