"""One token is generated for all who ask for the server's health."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kt_runtime.serve.http.health import SharedHealth


class Model:
    """An app that answers a question once it is let; `asked` counts."""

    def __init__(self, status: int = 200) -> None:
        self.status, self.asked, self.answers = status, 0, asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.asked += 1
        assert (await receive())["type"] == "http.request"
        await self.answers.wait()
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": b"scheduler's own words"})


async def ask(health: SharedHealth, path: str = "/health", method: str = "GET") -> tuple[int, bytes]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    await health({"type": "http", "path": path, "method": method, "headers": []}, receive, send)
    return sent[0]["status"], sent[1]["body"]


def run(test: Callable[[Model, SharedHealth, list[float]], Any]) -> None:
    async def started() -> None:
        model, now = Model(), [100.0]
        await test(model, SharedHealth(model, seconds=5.0, clock=lambda: now[0], wall=lambda: now[0]), now)

    asyncio.run(started())


def test_all_who_ask_at_once_and_soon_after_share_one_answer() -> None:
    async def test(model: Model, health: SharedHealth, now: list[float]) -> None:
        asking = [asyncio.create_task(ask(health)) for _ in range(50)]
        await asyncio.sleep(0)
        asking[0].cancel()  # a client that goes away
        await asyncio.sleep(0)
        model.answers.set()
        found = await asyncio.gather(*asking[1:])
        assert set(found) == {(200, b"")} and model.asked == 1
        now[0] += 4.9
        assert await ask(health) == (200, b"") and model.asked == 1
        now[0] += 0.2
        assert await ask(health) == (200, b"") and model.asked == 2

    run(test)


@pytest.mark.parametrize("jump_s", [1e9, -1e9])
def test_a_question_during_which_the_wall_clock_jumps_is_asked_again(jump_s: float) -> None:
    """SGLang's own wait, which has no end when the clock is set back, is dropped."""

    async def test() -> None:
        model, wall = Model(), [1e9]
        health = SharedHealth(model, clock=lambda: 100.0, wall=lambda: wall[0])
        asking = [asyncio.create_task(ask(health)) for _ in range(3)]
        while not model.asked:
            await asyncio.sleep(0)
        wall[0] += jump_s
        while model.asked == 1:
            await asyncio.sleep(0.01)
        model.answers.set()
        assert set(await asyncio.gather(*asking)) == {(200, b"")} and model.asked == 2

    asyncio.run(test())


@pytest.mark.parametrize("status", [503, 500])
def test_what_is_not_good_is_not_kept(status: int) -> None:
    async def test(model: Model, health: SharedHealth, _now: list[float]) -> None:
        model.status = status
        model.answers.set()
        assert await ask(health) == (status, b"")
        model.status = 200
        assert await ask(health) == (200, b"") and model.asked == 2

    run(test)


def test_other_routes_and_methods_are_handed_on() -> None:
    async def test(model: Model, health: SharedHealth, _now: list[float]) -> None:
        model.answers.set()
        for path, method in (("/health_generate", "GET"), ("/health", "HEAD"), ("/v1/models", "GET")):
            assert await ask(health, path, method) == (200, b"scheduler's own words")
        assert model.asked == 3

    run(test)


def test_a_stalled_engine_is_red_at_once_also_for_those_who_ask_already() -> None:
    async def test(model: Model, _health: SharedHealth, now: list[float]) -> None:
        why = [""]
        health = SharedHealth(model, seconds=5.0, clock=lambda: now[0], stalled=lambda: why[0])
        asking = asyncio.create_task(ask(health))
        await asyncio.sleep(0)
        why[0] = "the scheduler is stopped"
        assert await asking == (503, b"") and model.asked == 1
        assert await ask(health) == await ask(health, "/ready") == (503, b"") and model.asked == 1
        why[0] = ""
        model.answers.set()
        assert await ask(health) == (200, b"")

    run(test)


def test_a_server_that_catches_up_is_healthy_but_not_ready() -> None:
    async def test() -> None:
        model, is_behind = Model(), True
        model.answers.set()
        health = SharedHealth(model, catching_up=lambda: is_behind)
        assert (await ask(health, "/ready"))[0] == 503 and (await ask(health))[0] == 200
        is_behind = False
        assert (await ask(health, "/ready"))[0] == 200

    asyncio.run(test())
