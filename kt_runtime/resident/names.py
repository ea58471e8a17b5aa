"""The resident's end of the names channel: asks the frontend to move an adapter's name to another version.

No call blocks: the scheduler calls `send` and `poll` between two batches. The other end is `serve/http/names.py`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

import msgspec
import zmq

from kt_runtime.errors import ConflictError, RequestTimeoutError, ServerUnreachableError
from kt_runtime.wire.messages import MoveName, NameMoved

Done = Callable[[Exception | None], None]

TIMEOUT_SECONDS = 60.0
GRACE_SECONDS = 5.0  # the frontend rejects moves after the timeout; its last answers arrive within this time
MAX_FRAME_BYTES = 64 * 1024

_decode = msgspec.msgpack.Decoder(NameMoved).decode
_encode = msgspec.msgpack.Encoder().encode


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
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)  # milliseconds
        self._socket.connect(address)

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """For polling only: when the socket is readable, call `poll`. Only `poll` may receive from it."""
        return self._socket

    @property
    def num_waiting(self) -> int:
        """Number of moves whose `done` was not called yet."""
        return len(self._waiting) + len(self._failed_at_once)

    def send(self, name: str, version: str, lora_id: str, done: Done) -> None:
        move = MoveName(
            move_id=secrets.token_hex(8),
            name=name,
            adapter_version=version,
            lora_id=lora_id,
            expires_at=time.monotonic() + self.timeout_s,
        )
        try:
            self._socket.send(_encode(move), zmq.NOBLOCK)
        except zmq.Again:
            problem = ServerUnreachableError(f"{self.address}: the frontend takes no more messages; is it running?")
            self._failed_at_once.append((done, problem))
            return
        self._waiting[move.move_id] = (move, done)

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
                del self._waiting[move.move_id]
                done(RequestTimeoutError(f"the frontend did not move {move.name!r} within {self.timeout_s:g} s"))

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _receive(self) -> None:
        frames = self._socket.recv_multipart()
        try:
            answer = _decode(frames[0] if len(frames) == 1 else b"")
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return  # malformed, so not from the frontend; an unanswered move times out
        move, done = self._waiting.pop(answer.move_id, (None, None))
        if move is not None and done is not None:
            done(
                None if answer.error is None else ConflictError(f"adapter {move.name!r} was not moved: {answer.error}")
            )
