"""The frontend's end of the wire: calls to the resident that do not block the event loop."""

from __future__ import annotations

import time
from typing import Protocol, TypeVar

import numpy as np
import zmq.asyncio

from kt_runtime.wire.address import probe
from kt_runtime.wire.codec import Arrays, Limits
from kt_runtime.wire.messages import AnyRequest
from kt_runtime.wire.replies import Reply
from kt_runtime.wire.ticket import FIRST_RESEND_SECONDS, Ticket, checked_type, deliver, open_dealer

_R = TypeVar("_R", bound=Reply)


class AsyncResident(Protocol):
    """The part of `AsyncResidentClient` that the server's routes use, with the same errors. Tests replace it."""

    async def call(self, request: AnyRequest, reply_type: type[_R], timeout_s: float) -> _R: ...

    async def exchange(
        self, request: AnyRequest, reply_type: type[_R], timeout_s: float, arrays: Arrays | None = None
    ) -> tuple[_R, dict[str, np.ndarray]]: ...


class AsyncResidentClient:
    """Any number of calls may be in flight; unlike `ResidentClient`, this client does not order them.

    `resend_s`: seconds before the first retry.
    """

    def __init__(self, address: str, *, resend_s: float = FIRST_RESEND_SECONDS) -> None:
        self.address, self._resend_s, self._limits = address, resend_s, Limits()
        self._context: zmq.asyncio.Context = zmq.asyncio.Context()

    def close(self) -> None:
        self._context.destroy(linger=0)

    async def call(self, request: AnyRequest, reply_type: type[_R], timeout_s: float) -> _R:
        """As `exchange`, for a message without arrays."""
        return (await self.exchange(request, reply_type, timeout_s))[0]

    async def exchange(
        self, request: AnyRequest, reply_type: type[_R], timeout_s: float, arrays: Arrays | None = None
    ) -> tuple[_R, dict[str, np.ndarray]]:
        """Sends `request` with its arrays until a reply arrives; the resident executes each request id once.

        Raises ServerUnreachableError, RequestTimeoutError, ServerBusyError, and the error that the resident replies
        with.
        """
        ticket = Ticket.of(request, arrays, self._limits, self._resend_s)
        deadline = time.monotonic() + timeout_s
        with open_dealer(self._context, self.address, self._limits) as socket:
            while ticket.reply is None:
                now = time.monotonic()
                if now >= deadline:
                    raise ticket.timeout(self.address, timeout_s)
                if ticket.next_send <= now:
                    probe(self.address)
                    await socket.send_multipart(ticket.frames)
                    ticket.sent()
                left_s = min(deadline, ticket.next_send) - time.monotonic()
                if await socket.poll(int(max(0.0, left_s) * 1000) + 1):
                    deliver(await socket.recv_multipart(), {request.request_id: ticket}, self._limits)
        answer, found = ticket.result()
        return checked_type(self.address, answer, reply_type), found
