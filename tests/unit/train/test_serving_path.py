"""Many requests at once; what can go wrong with one is tested with `generation`, which asks through here."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from reference.server.fake_server import Answer, fake_server

from kt_runtime.errors import InvalidValueError
from kt_runtime.train.serving_path import Ask, Progress, ServingPath

AT_ONCE = 3


def reply(path: str, body: Any, number: int) -> Answer:
    time.sleep(0.01)
    return 200, {"text": str(body["input_ids"]), "meta_info": {"finish_reason": None}}


@pytest.mark.parametrize("adapter", ["pebble", None])
def test_whoever_asks_waits_for_a_turn_and_the_adapter_is_named(adapter: str | None) -> None:
    answers: dict[int, str] = {}

    async def work(ask: Ask) -> None:
        async def one(number: int) -> None:
            answers[number] = str((await ask({"input_ids": [number]}, f"row {number}"))["text"])

        await asyncio.gather(*map(one, range(20)))

    with fake_server(reply) as fake:
        ServingPath(fake.url, None, adapter, AT_ONCE).run(work)
    assert answers == {number: f"[{number}]" for number in range(20)}
    assert fake.most_at_once == AT_ONCE
    assert {body.get("lora_path") for _, body in fake.requests} == {adapter}


def test_a_failure_within_tasks_of_tasks_comes_out_alone() -> None:
    async def work(ask: Ask) -> None:
        async with asyncio.TaskGroup() as outer:
            for number in range(4):
                outer.create_task(inner(ask, number))

    async def inner(ask: Ask, number: int) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(ask({"input_ids": [number]}, f"row {number}"))

    refused = {"error": {"message": "no"}}
    with (
        fake_server(lambda path, body, number: (400, refused) if number == 2 else reply(path, body, number)) as fake,
        pytest.raises(InvalidValueError, match=r"^row .: the server answers HTTP 400: no$"),
    ):
        ServingPath(fake.url, None, None, AT_ONCE).run(work)


def test_progress_says_rate_and_time_left_every_few_seconds() -> None:
    now = [0.0]
    lines: list[str] = []
    progress = Progress(20, lines.append, lambda: now[0])
    for _ in range(20):
        now[0] += 1.0
        progress.add()
    assert lines == [
        "answered 5/20  1.00 rows/s  left 0:00:15",
        "answered 10/20  1.00 rows/s  left 0:00:10",
        "answered 15/20  1.00 rows/s  left 0:00:05",
        "answered 20/20  1.00 rows/s  left 0:00:00",
    ]
