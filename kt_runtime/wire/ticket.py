"""A request in flight, for all clients: when a client sends it again, which reply is its own and what that means."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import zmq

from kt_runtime.errors import KtError, ProtocolError, RequestTimeoutError, ServerBusyError
from kt_runtime.wire import codec
from kt_runtime.wire.codec import Arrays, Limits
from kt_runtime.wire.failures import error_from
from kt_runtime.wire.messages import AnyRequest, Request
from kt_runtime.wire.replies import AnyReply, ErrorReply, Reply

FIRST_RESEND_SECONDS = 5.0
LAST_RESEND_SECONDS = 60.0
FIRST_BUSY_SECONDS = 0.1
LAST_BUSY_SECONDS = 5.0

_R = TypeVar("_R", bound=Reply)
_S = TypeVar("_S", bound=zmq.Socket[Any])


@dataclass(eq=False)
class Ticket:
    """A request in flight; `ResidentClient.wait` takes it.

    `next_send`: time.monotonic() of the next retry. `resend_s`, `busy_s`: the pauses before retries, which double.

    `refused_busy`: the latest refusal of a busy server. `abandoned`: nobody waits for the reply any more.
    """

    request: Request
    frames: list[bytes]
    resend_s: float = FIRST_RESEND_SECONDS
    next_send: float = 0.0
    busy_s: float = FIRST_BUSY_SECONDS
    reply: AnyReply | None = None
    arrays: dict[str, np.ndarray] | None = None
    refused_busy: ServerBusyError | None = None
    abandoned: bool = False

    @classmethod
    def of(cls, request: AnyRequest, arrays: Arrays | None, limits: Limits, resend_s: float) -> Ticket:
        """Raises ProtocolError if the server would refuse the message."""
        frames = codec.encode(request, arrays, limits)
        try:
            codec.decode_request(frames, limits)  # constraints are only checked on decoding
        except ProtocolError as error:
            raise ProtocolError(f"{type(request).__name__}: {error}") from None
        return cls(request, frames, resend_s)

    def sent(self) -> None:
        """The request was sent now: plans the next retry."""
        self.next_send = time.monotonic() + self.resend_s
        self.resend_s = min(2 * self.resend_s, LAST_RESEND_SECONDS)

    def receive(self, reply: AnyReply, arrays: dict[str, np.ndarray]) -> None:
        """Keeps the reply; after the refusal of a busy server, plans a retry instead."""
        if isinstance(reply, ErrorReply) and reply.kind == ServerBusyError.__name__:
            self.refused_busy = ServerBusyError(reply.message)
            self.next_send = time.monotonic() + self.busy_s
            self.busy_s = min(2 * self.busy_s, LAST_BUSY_SECONDS)
        else:
            self.reply, self.arrays = reply, arrays

    def result(self) -> tuple[AnyReply, dict[str, np.ndarray]]:
        """The reply and its arrays; raises the error that the server replied with."""
        assert self.reply is not None and self.arrays is not None
        if isinstance(self.reply, ErrorReply):
            raise error_from(self.reply)
        return self.reply, self.arrays

    def timeout(self, address: str, timeout_s: float) -> KtError:
        """The error of a request that got no reply within `timeout_s`."""
        if self.refused_busy is not None:
            return self.refused_busy
        return RequestTimeoutError(
            f"{address}: no answer to {type(self.request).__name__} ({self.request.request_id}) within "
            f"{timeout_s:g} s; it may still be executed"
        )


def deliver(frames: Sequence[bytes], tickets: Mapping[str, Ticket], limits: Limits) -> Ticket | None:
    """Gives the reply in `frames` to its ticket, found by request id. Returns None if no ticket waits for it: a second
    answer to a retried request, or one after its deadline.

    Raises ProtocolError for malformed frames, and the error of a server that could not read a request's id.
    """
    reply, arrays = codec.decode_reply(frames, limits)
    ticket = tickets.get(reply.request_id)
    if ticket is not None:
        ticket.receive(reply, arrays)
    elif isinstance(reply, ErrorReply) and not reply.request_id:
        raise error_from(reply)
    return ticket


def checked_type(address: str, reply: AnyReply, reply_type: type[_R]) -> _R:
    if not isinstance(reply, reply_type):
        raise ProtocolError(f"{address}: answered {type(reply).__name__}, not {reply_type.__name__}")
    return reply


def open_dealer(context: zmq.Context[_S], address: str, limits: Limits) -> _S:
    """A DEALER socket that connects to `address`, now or when a server begins to listen there."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, 2 * limits.max_message_bytes)
    socket.setsockopt(zmq.RECONNECT_IVL, 20)  # milliseconds
    socket.connect(address)
    return socket
