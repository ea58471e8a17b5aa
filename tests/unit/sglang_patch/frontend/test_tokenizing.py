"""Text is tokenized in threads while the event loop turns; long texts wait for each other, short ones for none."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from kt_runtime.errors import RuntimeFault
from kt_runtime.sglang_patch.frontend import tokenizing
from kt_runtime.sglang_patch.frontend.overload import Overloaded, noting
from kt_runtime.sglang_patch.frontend.text_limits import ClientGone
from kt_runtime.sglang_patch.frontend.tokenizing import LONG_BYTES, MAX_WAITING_BYTES, TextExecutor, Tokenizing, drive

WAIT_SECONDS = 60


class Tokenizer:
    """Characters are tokens. Encodes when it may."""

    def __init__(self) -> None:
        self.backend_tokenizer = SimpleNamespace(normalizer=None)
        self.may_encode = threading.Event()
        self.may_encode.set()
        self.threads: set[threading.Thread] = set()

    def get_vocab(self) -> dict[str, int]:
        return {"a" * 100: 0}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert self.may_encode.wait(WAIT_SECONDS)
        self.threads.add(threading.current_thread())
        return [0] * (len(text) // 100)


class Request:
    def __init__(self, size: int, is_gone: bool = False) -> None:
        self.headers = {"content-length": str(size)}
        self.is_gone = is_gone

    async def is_disconnected(self) -> bool:
        return self.is_gone


async def tokenize(made: Tokenizing, text: str) -> Any:
    async def all_at_once() -> list[int]:
        result: list[int] = made.encode(text)
        return result

    return await made.tokenize(text, all_at_once, is_async=False)


def test_the_event_loop_turns_while_a_text_is_tokenized() -> None:
    tokenizer = Tokenizer()
    made = Tokenizing(tokenizer, 4096)
    tokenizer.threads.clear()

    async def main() -> None:
        tokenizer.may_encode.clear()
        long = asyncio.ensure_future(tokenize(made, "a" * 300_000))
        await asyncio.sleep(0)
        assert not long.done()
        tokenizer.may_encode.set()  # reached only if nothing here waits for the tokenizer
        assert len(await long) == 3000

    asyncio.run(main())
    assert threading.main_thread() not in tokenizer.threads


def test_a_short_text_does_not_wait_for_long_ones() -> None:
    executor = TextExecutor()
    gate = threading.Event()

    async def main() -> None:
        long = [asyncio.ensure_future(executor.run(LONG_BYTES + 1, lambda: gate.wait(WAIT_SECONDS))) for _ in range(20)]
        assert await executor.run(LONG_BYTES, lambda: "short") == "short"
        assert not any(future.done() for future in long)
        gate.set()
        assert all(await asyncio.gather(*long))

    asyncio.run(main())


def test_no_more_than_so_much_text_waits() -> None:
    executor = TextExecutor()
    gate = threading.Event()

    async def main() -> None:
        first = asyncio.ensure_future(executor.run(MAX_WAITING_BYTES, lambda: gate.wait(WAIT_SECONDS)))
        await asyncio.sleep(0)
        with noting() as noted, pytest.raises(Overloaded, match="wait to be tokenized; try again later") as caught:
            await asyncio.create_task(executor.run(LONG_BYTES + 1, lambda: None))
        assert noted == [caught.value]
        gate.set()
        assert await first
        assert await executor.run(MAX_WAITING_BYTES, lambda: 1) == 1

    asyncio.run(main())


def test_a_long_text_is_not_begun_when_its_client_has_gone_or_its_caller_has_ended() -> None:
    executor = TextExecutor()
    gate = threading.Event()
    begun: list[int] = []

    async def main() -> None:
        busy = asyncio.ensure_future(executor.run(LONG_BYTES + 1, lambda: gate.wait(WAIT_SECONDS)))
        await asyncio.sleep(0)
        tokenizing.current_request.set(Request(1, is_gone=True))
        gone = asyncio.ensure_future(executor.run(LONG_BYTES + 1, lambda: begun.append(1)))
        tokenizing.current_request.set(Request(1))
        ended = asyncio.ensure_future(executor.run(LONG_BYTES + 1, lambda: begun.append(2)))
        stays = asyncio.ensure_future(executor.run(LONG_BYTES + 1, lambda: begun.append(3)))
        await asyncio.sleep(0)
        ended.cancel()
        gate.set()
        with pytest.raises(ClientGone):
            await gone
        await stays
        await busy

    asyncio.run(main())
    assert begun == [3]


def test_conversions_of_sglangs_routes_take_the_lane_of_their_body() -> None:
    executor = TextExecutor()

    def thread_name(_request: Any, _raw: Any) -> str:
        return threading.current_thread().name

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(executor)
        small = await loop.run_in_executor(None, thread_name, None, Request(10))
        large = await loop.run_in_executor(None, thread_name, None, Request(LONG_BYTES + 1))
        assert (small.split("_")[0], large.split("_")[0]) == ("text", "long-text")
        assert await loop.run_in_executor(None, lambda: 5) == 5

    asyncio.run(main())


def test_a_text_that_is_too_long_is_refused_before_a_thread_takes_it() -> None:
    tokenizer = Tokenizer()
    made = Tokenizing(tokenizer, 4096)
    tokenizer.may_encode.clear()
    with pytest.raises(ValueError, match="at most 409,600 can fit"):
        asyncio.run(tokenize(made, "a" * 409_601))


def test_a_coroutine_that_waits_is_no_job_for_a_thread() -> None:
    with pytest.raises(RuntimeFault, match="waits for something"):
        drive(asyncio.sleep(0))
