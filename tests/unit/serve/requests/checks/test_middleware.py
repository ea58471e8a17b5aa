"""The middleware around a tiny ASGI app: what reaches the app, and what the client reads."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest

from kt_runtime.serve.http.route_table import FILE_BYTES, TRAINING_BODY_BYTES, rule_for
from kt_runtime.serve.requests.checks import body_reader
from kt_runtime.serve.requests.checks.body_reader import END_BYTES, SMALL_BODY_BYTES, largest_body_bytes
from kt_runtime.serve.requests.checks.middleware import TOO_LARGE, RequestMiddleware
from kt_runtime.serve.requests.checks.prompts import check_prompts
from kt_runtime.serve.requests.checks.refusal import Refusal
from kt_runtime.sglang_patch.frontend.overload import Overloaded
from kt_runtime.sglang_patch.frontend.tokenizing import LONG_BYTES

JSON = (b"content-type", b"application/json")
BODY = json.dumps({"text": "hello"}).encode()
LIMIT = 400_000
LONG_BODY = json.dumps({"text": "a" * LONG_BYTES}).encode()


class Exchange:
    """One request; `parts` are what the client sends. `app` sees the body and answers with `status`; SGLang's routes
    make any status of what is refused for now."""

    def __init__(
        self,
        *parts: bytes,
        path: str = "/generate",
        headers: Any = (JSON,),
        status: int = 200,
        overloaded: str = "",
    ) -> None:
        self.parts, self.received = list(parts), 0
        self.seen: bytes | None = None
        self.sent: list[Any] = []
        self.status, self.overloaded = status, overloaded
        self.scope: dict[str, Any] = {"type": "http", "method": "POST", "path": path, "headers": list(headers)}

    def run(self) -> Exchange:
        asyncio.run(
            RequestMiddleware(self._app, rule_for, LIMIT, [check_prompts])(self.scope, self._receive, self._send)
        )
        return self

    async def _receive(self) -> Any:
        if self.received == len(self.parts):
            return {"type": "http.disconnect"}
        self.received += 1
        more = self.received < len(self.parts)
        return {"type": "http.request", "body": self.parts[self.received - 1], "more_body": more}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)

    async def _app(self, _scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        assert not message["more_body"]
        self.seen = message["body"]
        self.after = await receive()
        if self.overloaded:
            with contextlib.suppress(ValueError):
                raise Overloaded(self.overloaded)
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": b"/opt/secret/path.py", "more_body": False})

    @property
    def answer(self) -> tuple[int, dict[str, Any]]:
        return self.sent[0]["status"], json.loads(b"".join(one["body"] for one in self.sent[1:]))["error"]


def test_app_sees_the_same_bytes_and_then_what_the_client_does_next() -> None:
    exchange = Exchange(BODY[:5], b"", BODY[5:]).run()
    assert exchange.seen == BODY and exchange.after["type"] == "http.disconnect"
    assert exchange.sent[0]["status"] == 200


def test_body_that_does_not_fit_never_reaches_the_app() -> None:
    exchange = Exchange(b'{"text": 5}').run()
    assert exchange.seen is None and exchange.answer[0] == 400 and exchange.answer[1]["param"] == "text"


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"content-type", b"text/plain")],
        [(b"content-type", b"application/json; charset=utf-16")],
        [(b"content-type", b"multipart/form-data; boundary=application/json")],
        [JSON, (b"content-encoding", b"gzip")],
        [JSON, (b"x-data-parallel-rank", b"1")],
    ],
)
def test_what_is_not_said_to_be_plain_json_for_this_rank_is_refused(headers: Any) -> None:
    exchange = Exchange(BODY, headers=headers).run()
    assert exchange.seen is None and exchange.answer[0] == 400


@pytest.mark.parametrize(
    "kind", [b"application/json; charset=utf-8", b"Application/JSON", b'application/json;charset="UTF-8"']
)
def test_json_may_be_said_in_other_words(kind: bytes) -> None:
    assert Exchange(BODY, headers=[(b"content-type", kind)]).run().seen == BODY


def test_declared_length_above_the_limit_is_refused_before_reading_and_the_rest_is_drained() -> None:
    declared = (b"content-length", str(LIMIT + 1).encode())
    exchange = Exchange(*[b"x" * 1000] * 50, headers=[JSON, declared]).run()
    assert exchange.answer[0] == 413 and (b"connection", b"close") in exchange.sent[0]["headers"]
    assert "--max-body-size" in exchange.answer[1]["message"] and exchange.seen is None
    assert exchange.received == 50 and exchange.sent[-1] == {"type": "http.response.body", "body": b""}


def test_body_of_unknown_length_is_read_no_further_than_the_limit() -> None:
    exchange = Exchange(*[b"x" * 50_000] * 10)
    seen_when_answered: list[int] = []

    async def send(message: Any) -> None:
        seen_when_answered.append(exchange.received)
        exchange.sent.append(message)

    exchange._send = send  # type: ignore[method-assign]
    exchange.run()
    assert exchange.answer[0] == 413 and seen_when_answered[0] == LIMIT // 50_000 + 1


def test_drain_is_bounded_in_bytes_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_reader, "DRAINED_BYTES", 3000)
    monkeypatch.setattr(body_reader, "DRAIN_SECONDS", 0.01)
    declared = (b"content-length", b"9" * 9)
    assert Exchange(*[b"x" * 1000] * 50, headers=[JSON, declared]).run().received == 3
    hanging = Exchange(b"x", b"x", headers=[JSON, declared])

    async def receive() -> Any:
        await asyncio.Event().wait()

    hanging._receive = receive  # type: ignore[method-assign]
    assert hanging.run().answer[0] == 413


def test_client_that_stops_sending_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_reader, "PART_SECONDS", 0.01)
    monkeypatch.setattr(body_reader, "DRAIN_SECONDS", 0.01)
    exchange = Exchange(b"x", b"x")

    async def receive() -> Any:
        await asyncio.Event().wait()

    exchange._receive = receive  # type: ignore[method-assign]
    assert exchange.run().answer[0] == 408


def test_client_that_sends_a_byte_now_and_then_is_answered_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_reader, "PART_SECONDS", 0.02)
    monkeypatch.setattr(body_reader, "SLOWEST_BYTES_PER_SECOND", LIMIT * 100)
    monkeypatch.setattr(body_reader, "DRAIN_SECONDS", 0.01)
    exchange = Exchange(*[b" "] * 1000)
    at_once = exchange._receive

    async def slowly() -> Any:
        await asyncio.sleep(0.005)
        return await at_once()

    monkeypatch.setattr(exchange, "_receive", slowly)
    status, error = exchange.run().answer
    assert status == 408 and "the body" in error["message"] and exchange.seen is None


def test_bodies_that_are_never_finished_leave_room_for_small_ones_and_give_theirs_back() -> None:
    room = body_reader.BodyRoom(100_000)
    stopped = asyncio.Event()

    async def read(*sizes: int, hang: bool = False) -> bytes:
        parts = [b"x" * size for size in sizes]

        async def receive() -> Any:
            if not parts:
                await stopped.wait()
                return {"type": "http.disconnect"}
            return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts) or hang}

        return await body_reader.BodyReader([], receive, LIMIT, room).read()

    async def run() -> None:
        hanging = asyncio.create_task(read(160_000, hang=True))
        await asyncio.sleep(0)
        assert room.taken_bytes == 160_000 - SMALL_BODY_BYTES
        with pytest.raises(Refusal, match="fill the memory for bodies") as raised:
            await read(80_000, 80_000)
        assert raised.value.status == 503
        assert len(await read(SMALL_BODY_BYTES)) == SMALL_BODY_BYTES
        stopped.set()
        with pytest.raises(body_reader.ClientGone):
            await hanging
        assert room.taken_bytes == 0
        assert len(await read(80_000, 80_000)) == 160_000

    asyncio.run(run())
    assert room.taken_bytes == 0


def test_routes_that_ask_nothing_have_a_small_limit() -> None:
    exchange = Exchange(b"x" * (SMALL_BODY_BYTES + 1), path="/flush_cache", headers=[]).run()
    assert exchange.answer[0] == 413 and exchange.seen is None
    assert Exchange(b"{}", path="/flush_cache", headers=[]).run().seen == b"{}"


def test_training_calls_of_tinker_clients_have_a_limit_of_their_own_and_may_be_compressed() -> None:
    body, zstd = b"x" * (LIMIT + 1), (b"content-encoding", b"zstd")
    assert Exchange(body, path="/api/v1/forward_backward", headers=[zstd]).run().seen == body
    declared = (b"content-length", str(TRAINING_BODY_BYTES + 1).encode())
    assert Exchange(b"{}", path="/api/v1/asample", headers=[declared]).run().sent[0]["status"] == 413
    for path, headers in (("/api/v1/forward_backward", [(b"content-encoding", b"gzip")]), ("/api/v1/asample", [zstd])):
        exchange = Exchange(b"{}", path=path, headers=headers).run()
        assert exchange.sent[0]["status"] == 400 and exchange.seen is None
        assert "Content-Encoding" in json.loads(exchange.sent[1]["body"])["detail"]


def test_a_route_may_get_the_ends_of_a_body_that_is_too_large() -> None:
    part = bytes(range(256)) * 4096
    parts = [b"head", *[part] * (TRAINING_BODY_BYTES // len(part)), b"tail"]
    exchange = Exchange(*parts, path="/api/v1/forward_backward").run()
    assert exchange.seen == b"" and exchange.sent[0]["status"] == 200
    found = exchange.scope[TOO_LARGE]
    assert found.head == (b"head" + part)[:END_BYTES] and found.tail == (part + b"tail")[-END_BYTES:]
    assert str(TRAINING_BODY_BYTES) in found.message
    declared = (b"content-length", str(TRAINING_BODY_BYTES + 1).encode())
    small = Exchange(b"head", b"tail", path="/api/v1/forward_backward", headers=[declared]).run()
    assert small.scope[TOO_LARGE].head == small.scope[TOO_LARGE].tail == b"headtail"


class Streamed(Exchange):
    """The app reads parts as they come, as a route that streams does. `seen`: the first byte of each later part."""

    async def _app(self, _scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        self.seen = message["body"]
        while message["more_body"]:
            message = await receive()
            self.seen += message["body"][:1]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def test_a_route_that_streams_gets_the_parts_and_is_refused_what_is_too_large() -> None:
    assert Streamed(b"a", b"b", path="/v1/files").run().seen == b"ab"
    part = bytes(1 << 20)
    exchange = Streamed(b"", *[part] * (FILE_BYTES // len(part) + 1), path="/v1/files").run()
    assert exchange.answer[0] == 413 and exchange.answer[1]["code"] == "request_too_large"
    assert len(exchange.seen or b"") == FILE_BYTES // len(part)  # parts
    declared = (b"content-length", str(2 * FILE_BYTES).encode())
    assert Streamed(b"", path="/v1/files", headers=[declared]).run().answer[0] == 413
    gone = Streamed(path="/v1/files").run()
    assert gone.sent == []


@pytest.mark.parametrize("query", [b"timeout=inf", b"timeout=nan", b"timeout=-1", b"timeout=1&timeout=2", b"tmeout=1"])
def test_query_is_checked_as_a_body_is(query: bytes) -> None:
    exchange = Exchange(b"", path="/flush_cache", headers=[])
    exchange.scope["query_string"] = query
    assert exchange.run().answer[0] == 400 and exchange.seen is None
    fitting = Exchange(b"", path="/flush_cache", headers=[])
    fitting.scope["query_string"] = b"timeout=2.5"
    assert fitting.run().seen == b""


def test_client_that_goes_away_is_not_answered() -> None:
    exchange = Exchange().run()
    assert exchange.sent == [] and exchange.seen is None


def test_fault_of_the_server_is_answered_without_its_exception() -> None:
    exchange = Exchange(BODY, status=500).run()
    assert exchange.answer[0] == 500 and "secret" not in repr(exchange.sent)
    own = Exchange(b"", path="/kt/cache/clear", headers=[], status=500).run()
    assert b"secret" in own.sent[1]["body"]  # ours say nothing that they should not
    assert Exchange(BODY, status=503).run().sent[0]["status"] == 503


def test_other_protocols_pass() -> None:
    passed: list[str] = []

    async def app(scope: Any, _receive: Any, _send: Any) -> None:
        passed.append(scope["type"])

    never: Callable[..., Any] = lambda *_: pytest.fail("not called")  # noqa: E731
    for kind in ("lifespan", "websocket"):
        asyncio.run(RequestMiddleware(app, rule_for, LIMIT, [])({"type": kind, "path": "/"}, never, never))
    assert passed == ["lifespan", "websocket"]


def test_largest_body_follows_from_the_context_length() -> None:
    assert largest_body_bytes(4096) == 1024 * 1024 + 64 * 4096
    assert largest_body_bytes(163_840) == 11 * 1024 * 1024


@pytest.mark.parametrize("path", ["/generate", "/v1/messages"])
@pytest.mark.parametrize("status", [200, 400, 500])
def test_what_is_refused_for_now_is_503_and_says_when_to_try_again(path: str, status: int) -> None:
    """Whatever SGLang makes of it, a stream's 200 included."""
    body = LONG_BODY if path == "/generate" else LONG_BODY[:-1] + b', "max_tokens": 4, "model": "m", "messages": []}'
    body = body if path == "/generate" else body.replace(b'"text": "', b'"system": "')
    exchange = Exchange(body, path=path, status=status, overloaded="9 bytes wait; try again later").run()
    given, error = exchange.answer
    assert given == 503
    assert error["message"] == "9 bytes wait; try again later"
    assert (b"retry-after", b"5") in exchange.sent[0]["headers"]
    assert len(exchange.sent) == 2


def test_a_long_body_that_is_taken_is_answered_as_it_was() -> None:
    sent = Exchange(LONG_BODY).run().sent
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert (sent[0]["status"], sent[1]["body"]) == (200, b"/opt/secret/path.py")


def test_each_503_and_429_says_when_to_try_again() -> None:
    for path in ("/generate", "/kt/status"):
        for status in (429, 503):
            assert (b"retry-after", b"5") in Exchange(BODY, path=path, status=status).run().sent[0]["headers"]
    assert not Exchange(BODY, status=404).run().sent[0]["headers"]
