"""Futures: one per key, kept for a while, and known ids only."""

from __future__ import annotations

import asyncio

import numpy as np

from kt_runtime.errors import InvalidValueError, RuntimeFault
from kt_runtime.serve.tinker.futures import Failure, Futures
from kt_runtime.serve.tinker.protocol.results import ForwardResult, JsonResult

DONE = JsonResult({"done": True})


def test_a_key_has_one_future_and_an_outcome_is_final() -> None:
    futures = Futures()
    future = futures.open(("call", "run", 1), "s1")
    assert futures.known(("call", "run", 1)) is future and futures.get(future.request_id) is future
    futures.finish(future, DONE)
    futures.finish(future, Failure("late", "server"))
    assert future.outcome is DONE and futures.num_open == 0


def test_waiting_ends_with_the_outcome_or_the_time() -> None:
    async def scenario() -> None:
        futures = Futures()
        future = futures.open("key", "s1")
        assert not await futures.wait(future, 0.01)
        asyncio.get_running_loop().call_later(0.01, futures.finish, future, DONE)
        assert await futures.wait(future, 5)

    asyncio.run(scenario())


def test_finished_futures_are_forgotten_by_age_and_number_but_open_ones_never() -> None:
    now = [0.0]
    futures = Futures(max_kept=2, kept_s=10, now=lambda: now[0])
    waiting = futures.open("waiting", "s1")
    done = [futures.open(index, "s1") for index in range(3)]
    for future in done:
        futures.finish(future, DONE)
    assert futures.get(done[0].request_id) is None and futures.known(0) is None
    assert futures.get(done[1].request_id) is done[1]
    now[0] = 11.0
    assert futures.get(done[2].request_id) is None
    assert futures.get(waiting.request_id) is waiting


def test_large_results_are_kept_within_a_bound_but_the_newest_always() -> None:
    futures = Futures(max_bytes=10_000)
    large = ForwardResult([np.zeros(2000, np.float32)], {})
    first, second = futures.open(1, "s1"), futures.open(2, "s1")
    futures.finish(first, large)
    assert futures.get(first.request_id) is first
    futures.finish(second, large)
    assert futures.get(first.request_id) is None and futures.get(second.request_id) is second


def test_the_end_of_an_owner_ends_its_futures_only() -> None:
    futures = Futures()
    mine, other = futures.open("a", "s1"), futures.open("b", "s2")
    futures.end_owner("s1", Failure("ended", "user"))
    assert isinstance(mine.outcome, Failure) and other.outcome is None


def test_an_error_of_the_user_has_the_category_user() -> None:
    assert Failure.of(InvalidValueError("x")) == Failure("x", "user")
    assert Failure.of(RuntimeFault("y")) == Failure("y", "server")
