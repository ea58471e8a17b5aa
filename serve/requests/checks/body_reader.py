"""Reads a request's body, bounded in size, in the memory of all bodies together, and in time.

The size limit is known before the first byte is read:

    largest body = 1 MiB + 64 bytes × context length

A prompt takes at most about 16 bytes per token, as text with escapes or as token ids with commas, so a body has room
for four prompts of full length or more shorter ones. The 1 MiB is for tools, schemas and stop strings, which also have
bounds of their own. The limit is 3.5 MiB for Qwen3-30B-A3B (40,960 tokens) and 11 MiB for DeepSeek-V3 (163,840).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from kt_runtime.serve.requests.checks.checking import shortened
from kt_runtime.serve.requests.checks.refusal import Refusal

FIXED_BYTES = 1024 * 1024
BYTES_PER_TOKEN = 16
FULL_PROMPTS = 4
BODIES_AT_ONCE = 16  # bodies of the largest size that may be read concurrently
LEAST_ROOM_BYTES = 128 * 1024 * 1024  # of all bodies, also of a model with a short context
SMALL_BODY_BYTES = 64 * 1024  # of routes that do not use the model
# Timeout for a client that sends nothing.
PART_SECONDS = 30.0
# The minimum rate, against clients that trickle bytes and hold the memory of all bodies. Slow lines are faster.
SLOWEST_BYTES_PER_SECOND = 32 * 1024
# The part of a refused body that is read and discarded: without the reading, the connection of a client that still
# sends would be reset before the client has read the answer.
DRAINED_BYTES, DRAIN_SECONDS = 64 * 1024 * 1024, 5.0
# What is kept of a body that is too large, from each end, and how long its reading may take.
END_BYTES, SKIPPED_BYTES, SKIP_SECONDS = 256 * 1024, 1024 * 1024 * 1024, 60.0


def largest_body_bytes(context_tokens: int) -> int:
    return FIXED_BYTES + FULL_PROMPTS * BYTES_PER_TOKEN * context_tokens


class ClientGone(Exception):
    """The client disconnected while its body was read, so no answer can be sent."""


class BodyRoom:
    """The bytes of all bodies that are being read. The first SMALL_BODY_BYTES of each body do not count, so that small
    bodies are never refused."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes, self.taken_bytes = limit_bytes, 0


class BodyReader:
    """Reads one body. `is_complete`: the client has sent all of the body. `takes_zstd`: it may be compressed; it is not
    decompressed here."""

    def __init__(
        self,
        headers: list[tuple[bytes, bytes]],
        receive: Callable[[], Awaitable[Any]],
        limit_bytes: int,
        room: BodyRoom,
        *,
        takes_zstd: bool = False,
    ) -> None:
        self._headers, self._receive, self._limit, self._room = headers, receive, limit_bytes, room
        self._encodings = (b"", b"identity", b"zstd") if takes_zstd else (b"", b"identity")
        self._received, self._num_streamed, self._until = bytearray(), 0, 0.0
        self.is_complete = False

    async def read(self) -> bytes:
        """The whole body. Raises ClientGone, and Refusal: 413 as soon as the body is known to be too large, 400 for a
        compressed body, 408 for a client that stops or is too slow, 503 while other bodies take the memory."""
        self._begin()
        counted, received = 0, self._received
        try:
            while not self.is_complete:
                received += await self._next_part(self._until)
                if len(received) > self._limit:
                    raise self._too_large(f"more than {self._limit} bytes")
                counted += self._take(max(len(received) - SMALL_BODY_BYTES, 0) - counted)
        finally:
            self._room.taken_bytes -= counted
        return bytes(received)

    async def stream(self) -> Any:
        """ASGI `receive` for a route that reads the body as it arrives. Raises as `read`, except for the memory."""
        if self.is_complete:
            return await self._receive()
        if not self._until:
            self._begin()
        part = await self._next_part(self._until)
        self._num_streamed += len(part)
        if self._num_streamed > self._limit:
            raise self._too_large(f"more than {self._limit} bytes")
        return {"type": "http.request", "body": part, "more_body": not self.is_complete}

    async def ends(self) -> tuple[bytes, bytes]:
        """The first and the last END_BYTES of a body that `read` found too large; the bytes between them are read and
        discarded. Raises as `read`, 413 for more than SKIPPED_BYTES."""
        head, tail = bytearray(self._received[:END_BYTES]), bytearray(self._received[-END_BYTES:])
        num_skipped, self._received = 0, bytearray()
        until = asyncio.get_running_loop().time() + SKIP_SECONDS
        while not self.is_complete:
            part = await self._next_part(until)
            head += part[: max(0, END_BYTES - len(head))]
            tail = (tail + part)[-END_BYTES:]
            num_skipped += len(part)
            if num_skipped > SKIPPED_BYTES:
                raise self._too_large(f"more than {SKIPPED_BYTES} bytes")
        return bytes(head), bytes(tail)

    def _begin(self) -> None:
        """Checks the headers. Raises Refusal."""
        for name, value in self._headers:
            if name == b"content-length" and value.isdigit() and (len(value) > 18 or int(value) > self._limit):
                raise self._too_large(f"{value[:20].decode()} bytes")
            if name == b"content-encoding" and value.strip().lower() not in self._encodings:
                raise Refusal(400, f"Content-Encoding {shortened(value.decode('latin-1'))}: send the body as it is")
        self._until = asyncio.get_running_loop().time() + PART_SECONDS + self._limit / SLOWEST_BYTES_PER_SECOND

    def _take(self, num_bytes: int) -> int:
        if self._room.taken_bytes + num_bytes > self._room.limit_bytes:
            raise Refusal(503, "the bodies of other requests fill the memory for bodies; try again", code="busy")
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
            raise Refusal(408, f"no byte of the body arrived for {min(PART_SECONDS, left_s):.3g} s") from None

    async def _receive_part(self) -> bytes:
        message = await self._receive()
        if message["type"] != "http.request":
            raise ClientGone
        self.is_complete = not message.get("more_body", False)
        part: bytes = message.get("body", b"")
        return part

    async def drain(self) -> None:
        """Reads and discards the rest of the body, at most DRAINED_BYTES and for at most DRAIN_SECONDS."""
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
