"""The resident's requests to the frontend: move an adapter's name to another version.

The scheduler calls `send` and `poll` between two batches; neither blocks. The other end is `serve/http/names.py`.
Unlike the other clients, this one sends each request once: a retry could arrive after a later move of the same name.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import zmq

from kt_runtime.errors import ConflictError, KtError, RequestTimeoutError, ServerUnreachableError, UserError
from kt_runtime.wire import codec
from kt_runtime.wire.codec import Limits
from kt_runtime.wire.failures import error_from, error_reply
from kt_runtime.wire.messages import MoveName
from kt_runtime.wire.replies import AnyReply, ErrorReply
from kt_runtime.wire.ticket import Ticket, deliver, open_dealer

Done = Callable[[Exception | None], None]

TIMEOUT_SECONDS = 60.0
GRACE_SECONDS = 5.0  # the frontend rejects moves after the timeout; its last answers arrive within this time
LIMITS = Limits(max_message_bytes=64 * 1024)


@dataclass(eq=False)
class _Move(Ticket):
    request: MoveName
    done: Done = field(kw_only=True)

    def receive(self, reply: AnyReply, arrays: dict[str, np.ndarray]) -> None:
        """Keeps the first reply, which may be a busy server's refusal."""
        self.reply = self.reply or reply


class NamesChannel:
    """One connection to the frontend at `address` (ipc://); the frontend may start to listen later.

    Not thread-safe. `done(None)`: the name has moved; `done(error)`: it has not and will not. `poll` calls `done`,
    exactly once for each `send`, except for moves that are still open at `close`.
    """

    def __init__(self, address: str, *, timeout_s: float = TIMEOUT_SECONDS, grace_s: float = GRACE_SECONDS) -> None:
        self.address, self.timeout_s, self.grace_s = address, timeout_s, grace_s
        self._moves: dict[str, _Move] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = open_dealer(self._context, address, LIMITS)

    @property
    def socket(self) -> zmq.Socket[Any]:
        """For polling only: when the socket is readable, call `poll`. Only `poll` may receive from it."""
        return self._socket

    def send(self, name: str, version: str, lora_id: str, done: Done) -> None:
        request = MoveName(
            request_id=secrets.token_hex(8),
            name=name,
            adapter_version=version,
            lora_id=lora_id,
            expires_at=time.monotonic() + self.timeout_s,
        )
        move = _Move(request, codec.encode(request, limits=LIMITS), done=done)
        try:
            self._socket.send_multipart(move.frames, zmq.NOBLOCK)
        except zmq.Again:
            problem = ServerUnreachableError(f"{self.address}: the frontend takes no more messages; is it running?")
            move.receive(error_reply(request.request_id, problem), {})
        self._moves[request.request_id] = move

    def wait(self, seconds: float) -> None:
        """Sleeps until an answer can be polled, at most `seconds`. Returns at once if no move waits for one."""
        if any(move.reply is None for move in self._moves.values()):
            self._socket.poll(int(1000 * seconds))

    def poll(self) -> None:
        """Calls `done` of every move that has succeeded, failed or timed out."""
        while self._socket.poll(0):  # also for a late answer, or the socket would stay readable
            with contextlib.suppress(KtError):  # not the answer to a move; an unanswered move times out
                deliver(self._socket.recv_multipart(), self._moves, LIMITS)
        now = time.monotonic()
        for move in list(self._moves.values()):
            if move.reply or now > move.request.expires_at + self.grace_s:
                del self._moves[move.request.request_id]
                move.done(self._problem(move))

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _problem(self, move: _Move) -> KtError | None:
        name = move.request.name
        if move.reply is None:
            return RequestTimeoutError(f"the frontend did not move {name!r} within {self.timeout_s:g} s")
        error = error_from(move.reply) if isinstance(move.reply, ErrorReply) else None
        return ConflictError(f"adapter {name!r} was not moved: {error}") if isinstance(error, UserError) else error
