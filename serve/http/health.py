"""`/health` with a shared answer: for each request, SGLang has the model generate a token and waits a second.

The route needs no key, so that load balancers and orchestrators can poll it. Concurrent requests share one answer, and
a good answer is reused for `SECONDS`. While the engine is stalled (`sglang_patch/frontend/stalls.py`), `/health` and
`/ready` answer 503 at once: SGLang's `/health` waits for 20 s, and its `/ready` does not ask the engine.

SGLang's route compares times of the wall clock. A clock that is set forward makes it red, one that is set back lets it
wait until that time has come again. So a request during which the clock jumps is dropped, and another one is made.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from kt_runtime.serve.requests.checks.middleware import App, Receive, Scope, Send, route_path

PATH, READY = "/health", "/ready"
SECONDS = 1.0  # a hung engine is to be seen within 5 s
LOOK_SECONDS = 0.25
JUMP_SECONDS = 0.5  # of the wall clock, by the monotonic one; adjusting it (NTP) is far slower


class SharedHealth:
    """ASGI middleware. An answer other than 200 is shared by the requests that wait for it, and is not reused.

    `stalled()`: why the engine can't answer; empty while it works. `catching_up()`: `/ready` alone answers 503.
    """

    def __init__(
        self,
        app: App,
        seconds: float = SECONDS,
        clock: Callable[[], float] = time.monotonic,
        stalled: Callable[[], str] = lambda: "",
        catching_up: Callable[[], bool] = lambda: False,
        wall: Callable[[], float] = lambda: time.time(),
    ) -> None:
        self._app, self._seconds, self._clock, self._stalled = app, seconds, clock, stalled
        self._catching_up = catching_up
        self._wall, self._asked_at_offset = wall, 0.0
        self._good_until = float("-inf")
        self._asking: asyncio.Task[int] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = route_path(scope) if scope["type"] == "http" else ""
        red = path in (PATH, READY) and (bool(self._stalled()) or (path == READY and self._catching_up()))
        if not red and (path != PATH or scope["method"] != "GET"):
            await self._app(scope, receive, send)
            return
        status = 503 if red else 200 if self._clock() < self._good_until else await self._ask(scope)
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async def _ask(self, scope: Scope) -> int:
        """The status code. One client's disconnect does not cancel the shared request."""
        while not self._stalled():
            if self._asking is None or self._asking.done():
                self._asking = asyncio.create_task(self._status({**scope, "query_string": b""}))
                self._asked_at_offset = self._offset()
            asking = self._asking
            done, _ = await asyncio.wait({asking}, timeout=LOOK_SECONDS)
            if asking.cancelled():
                continue
            if self._asking is asking and abs(self._offset() - self._asked_at_offset) > JUMP_SECONDS:
                asking.cancel()
                self._asking = None
            elif done:
                return asking.result()
        return 503

    def _offset(self) -> float:
        return self._wall() - self._clock()

    async def _status(self, scope: Scope) -> int:
        found = 500
        sent = False

        async def receive() -> Any:
            nonlocal sent
            if sent:
                await asyncio.Event().wait()  # the shared request has no client that could disconnect
            sent = True
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            nonlocal found
            if message["type"] == "http.response.start":
                found = message["status"]

        await self._app(scope, receive, send)
        if found == 200:
            self._good_until = self._clock() + self._seconds
        return found
