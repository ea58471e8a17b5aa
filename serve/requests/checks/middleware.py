"""ASGI middleware: reads a body within its limit, checks it, and gives SGLang the same bytes, or the bytes of the
body's `normal_form`.

A refused request never reaches SGLang. SGLang's answers with status 500 are replaced, since they may quote a server
exception with paths; the log has it. The answer to a request refused for overload is also replaced, by a 503, or by a
429 where the limits of the client's key are reached: SGLang reports both as a client's mistake. Each has a Retry-After
header.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass
from email.message import Message
from typing import Any, Protocol

from kt_runtime.serve.requests.bodies.bounds import Body
from kt_runtime.serve.requests.checks.body_reader import (
    BODIES_AT_ONCE,
    LEAST_ROOM_BYTES,
    SMALL_BODY_BYTES,
    BodyReader,
    BodyRoom,
    ClientGone,
)
from kt_runtime.serve.requests.checks.checking import parse_query, parsed, shortened
from kt_runtime.serve.requests.checks.refusal import OWN_ROUTES, Refusal, answer
from kt_runtime.sglang_patch.frontend.overload import OverLimit, Overloaded, client_request, noting
from kt_runtime.sglang_patch.frontend.tokenizing import LONG_BYTES

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

RETRY_AFTER = (b"retry-after", b"5")  # seconds; a long text or a grammar takes some
RANK_HEADERS = (b"x-data-parallel-rank", b"x-smg-routing-key")


TOO_LARGE = "kt_runtime.too_large"


@dataclass(frozen=True)
class TooLarge:
    """Under TOO_LARGE in the scope of a route that `takes_ends`, whose body then reads as empty. `head`, `tail`: the
    body's first and last bytes."""

    message: str
    head: bytes
    tail: bytes


class Fields(Protocol):
    """A rule of the route table: the structs of a route's body and query, None where SGLang parses none; the largest
    body of a route that checks its own, and whether that may be compressed with zstd, is read by the route as it
    arrives, or comes by its ends if it is too large."""

    @property
    def body(self) -> type[Body] | None: ...
    @property
    def query(self) -> type[Body] | None: ...
    @property
    def max_bytes(self) -> int: ...
    @property
    def takes_zstd(self) -> bool: ...
    @property
    def streams(self) -> bool: ...
    @property
    def takes_ends(self) -> bool: ...


class RequestMiddleware:
    """`fields_of(method, path)`: the route table. `checks` run on each parsed body, and raise Refusal."""

    def __init__(
        self,
        app: App,
        fields_of: Callable[[str, str], Fields | None],
        max_body_bytes: int,
        checks: Sequence[Callable[[Body], None]],
    ) -> None:
        self.app, self.fields_of, self.max_body_bytes, self.checks = app, fields_of, max_body_bytes, checks
        self.room = BodyRoom(max(BODIES_AT_ONCE * max_body_bytes, LEAST_ROOM_BYTES))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = route_path(scope)
        fields = self.fields_of(scope["method"], path)
        body_type = fields.body if fields else None
        own_bytes = fields.max_bytes if fields else SMALL_BODY_BYTES
        limit_bytes = self.max_body_bytes if body_type else own_bytes
        takes_zstd = fields is not None and fields.takes_zstd
        reader = BodyReader(scope["headers"], receive, limit_bytes, self.room, takes_zstd=takes_zstd)
        try:
            if fields is not None and fields.streams:
                await self.app(scope, reader.stream, send)
                return
            body = await self._body(scope, reader, takes_ends=fields is not None and fields.takes_ends)
            if fields is not None and fields.query is not None:
                parse_query(scope.get("query_string", b""), fields.query)
            if body_type is not None:
                check_headers(scope["headers"])
                request, body = parsed(body, body_type)
                for check in self.checks:
                    check(request)
        except Refusal as refusal:
            logger.info("%s %r: %s", scope["method"], path, shortened(refusal.message))
            await _refuse(refusal, path, reader, send)
            return
        except ClientGone:
            return
        if path.startswith(OWN_ROUTES):
            await self.app(scope, _Replay(body, receive), lambda message: send(with_retry_after(message)))
            return
        with noting() as overloads:
            may_wait = len(body) > LONG_BYTES or client_request.get() is not None
            guarded = _Guarded(send, path, overloads, may_wait=may_wait)
            await self.app(scope, _Replay(body, receive), guarded)

    async def _body(self, scope: Scope, reader: BodyReader, *, takes_ends: bool) -> bytes:
        try:
            return await reader.read()
        except Refusal as refusal:
            if refusal.status != 413 or not takes_ends:
                raise
            scope[TOO_LARGE] = TooLarge(refusal.message, *await reader.ends())
            return b""


def check_headers(headers: list[tuple[bytes, bytes]]) -> None:
    """Raises Refusal (400) for a content type other than JSON, and for headers that address other ranks."""
    for name, _ in headers:
        if name in RANK_HEADERS:
            raise Refusal(
                400, f"header {name.decode()}: a request can not choose a rank; all ranks compute each request"
            )
    given = next((value.decode("latin-1") for name, value in headers if name == b"content-type"), None)
    stated = Message()
    stated["content-type"] = (given or "").lower()
    if given is None or stated.get_content_type() != "application/json":
        shown = "is missing" if given is None else f"is {shortened(given)}"
        raise Refusal(400, f"Content-Type {shown}; it must be application/json")
    charset = str(stated.get_param("charset", ""))
    if charset not in ("", "utf-8", "utf8"):
        raise Refusal(400, f"Content-Type: charset {shortened(charset)}; JSON is UTF-8")


def route_path(scope: Scope) -> str:
    """The path as routes match it, without a proxy's prefix."""
    path: str = scope["path"].removeprefix(scope.get("root_path") or "")
    return path or "/"


class _Replay:
    """ASGI `receive` for SGLang: first the body that was read, then the client's further messages."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Any:
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


class _Guarded:
    """ASGI `send` that replaces an answer with status 500, and any answer once the request is refused for overload (an
    error in `overloads`). `may_wait`: overload is possible, so the headers wait for the answer's next message."""

    def __init__(self, send: Send, path: str, overloads: Sequence[Overloaded], may_wait: bool) -> None:
        self._send, self._path, self._overloads, self._may_wait = send, path, overloads, may_wait
        self._replaced, self._start = False, None

    async def __call__(self, message: Any) -> None:
        if self._replaced:
            return
        if message["type"] == "http.response.start":
            self._start = message
            if self._may_wait:
                return
        if self._start is not None:
            start, self._start = self._start, None
            if await self._has_replaced(start):
                return
            await self._send(with_retry_after(start))
        if message["type"] != "http.response.start":
            await self._send(message)

    async def _has_replaced(self, start: Any) -> bool:
        if self._overloads:
            overload = self._overloads[0]
            code = "rate_limit_exceeded" if isinstance(overload, OverLimit) else "busy"
            refusal = Refusal(int(overload.status_code), str(overload), code=code)
        elif start["status"] == 500:
            logger.error("%r: answered with status 500; the log above may have the reason", self._path)
            refusal = Refusal(500, "internal error; the server's log has it")
        else:
            return False
        self._replaced = True
        await _send_answer(refusal, self._path, self._send)
        return True


def with_retry_after(message: Any) -> Any:
    """`message`, with a Retry-After header if it starts an answer with status 503 or 429."""
    headers = message.get("headers", ())
    if message.get("status") not in (429, 503) or b"retry-after" in [name.lower() for name, _ in headers]:
        return message
    return {**message, "headers": [*headers, RETRY_AFTER]}


async def _refuse(refusal: Refusal, path: str, reader: BodyReader, send: Send) -> None:
    if reader.is_complete:
        await _send_answer(refusal, path, send)
        return
    await _send_answer(refusal, path, send, close=True, more_body=True)
    await reader.drain()
    await send({"type": "http.response.body", "body": b""})


async def _send_answer(
    refusal: Refusal, path: str, send: Send, *, close: bool = False, more_body: bool = False
) -> None:
    body = answer(refusal, path)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if close:
        headers.append((b"connection", b"close"))
    await send(with_retry_after({"type": "http.response.start", "status": refusal.status, "headers": headers}))
    await send({"type": "http.response.body", "body": body, "more_body": more_body})
