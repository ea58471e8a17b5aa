"""Reads a request's body: within its size, within the room that all bodies together have, and not for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from kt_runtime.serve.requests.checks.body_size import SMALL_BODY_BYTES
from kt_runtime.serve.requests.checks.checking import shortened
from kt_runtime.serve.requests.checks.refusal import Refusal

# A client that sends nothing for so long is not waited for any longer.
PART_SECONDS = 30.0
# Nor one that sends a byte now and then, and keeps the room of all. Above what a slow line takes for a body.
SLOWEST_BYTES_PER_SECOND = 32 * 1024
# What is still read, and thrown away, of a body that was refused: a client that is sending would otherwise find its
# connection reset before it has read the answer.
DRAINED_BYTES, DRAIN_SECONDS = 64 * 1024 * 1024, 5.0


class ClientGone(Exception):
    """The client went away while its body was read; nobody is there to be answered."""


class BodyRoom:
    """Bytes of all bodies that are being read. Small bodies are not counted, so that they always get through."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes, self.taken_bytes = limit_bytes, 0


class BodyReader:
    """`is_complete`: the client has sent all of it."""

    def __init__(
        self,
        headers: list[tuple[bytes, bytes]],
        receive: Callable[[], Awaitable[Any]],
        limit_bytes: int,
        room: BodyRoom,
    ) -> None:
        self._headers, self._receive, self._limit, self._room = headers, receive, limit_bytes, room
        self.is_complete = False

    async def read(self) -> bytes:
        """Raises Refusal: 413 as soon as it is known that the body is too large, 400 for one that is compressed, 408
        for a client that stops sending, 503 while other bodies take the room; and ClientGone."""
        for name, value in self._headers:
            if name == b"content-length" and value.isdigit() and (len(value) > 18 or int(value) > self._limit):
                raise self._too_large(f"{value[:20].decode()} bytes")
            if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
                raise Refusal(400, f"Content-Encoding {shortened(value.decode('latin-1'))}: send the body as it is")
        received, counted = bytearray(), 0
        until = asyncio.get_running_loop().time() + PART_SECONDS + self._limit / SLOWEST_BYTES_PER_SECOND
        try:
            while not self.is_complete:
                received += await self._next_part(until)
                if len(received) > self._limit:
                    raise self._too_large(f"more than {self._limit} bytes")
                counted += self._take(max(len(received) - SMALL_BODY_BYTES, 0) - counted)
        finally:
            self._room.taken_bytes -= counted
        return bytes(received)

    def _take(self, num_bytes: int) -> int:
        if self._room.taken_bytes + num_bytes > self._room.limit_bytes:
            raise Refusal(503, "other requests' bodies take all the room for bodies; try again", code="busy")
        self._room.taken_bytes += num_bytes
        return num_bytes

    async def _next_part(self, until: float) -> bytes:
        left_s = until - asyncio.get_running_loop().time()
        if left_s <= 0:
            raise Refusal(408, f"the body comes more slowly than {SLOWEST_BYTES_PER_SECOND // 1024} KiB a second")
        try:
            async with asyncio.timeout(min(PART_SECONDS, left_s)):
                return await self._receive_part()
        except TimeoutError:
            raise Refusal(408, f"the body did not go on for {min(PART_SECONDS, left_s):.3g} s") from None

    async def _receive_part(self) -> bytes:
        message = await self._receive()
        if message["type"] != "http.request":
            raise ClientGone
        self.is_complete = not message.get("more_body", False)
        part: bytes = message.get("body", b"")
        return part

    async def drain(self) -> None:
        """Throws away what else the client sends, within bounds."""
        drained = 0
        try:
            async with asyncio.timeout(DRAIN_SECONDS):
                while not self.is_complete and drained < DRAINED_BYTES:
                    drained += len(await self._receive_part())
        except (TimeoutError, ClientGone):
            return

    def _too_large(self, found: str) -> Refusal:
        return Refusal(
            413,
            f"the body has {found}; this server takes {self._limit} for this route (`kt-runtime serve "
            "--max-body-size`; docs/http.md says how it follows from the context length)",
            code="request_too_large",
        )
