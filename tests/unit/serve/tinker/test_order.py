"""Calls by seq_id: in order however they arrive, bounded while they wait, and never waiting for ever."""

from __future__ import annotations

import random

import pytest

from kt_runtime.errors import InvalidValueError, ServerBusyError
from kt_runtime.serve.tinker.order import CallOrder


def put(order: CallOrder[int], seq_id: int | None, num_bytes: int = 0) -> None:
    place = order.check(seq_id, num_bytes)
    order.put(place, place, num_bytes)


def taken(order: CallOrder[int]) -> list[int]:
    found = []
    while (call := order.take()) is not None:
        found.append(call)
    return found


def test_calls_are_taken_in_order_however_they_arrive() -> None:
    draw = random.Random(1)
    for _ in range(50):
        order: CallOrder[int] = CallOrder()
        arriving = draw.sample(range(1, 21), 20)
        found = []
        for seq_id in arriving:
            put(order, seq_id)
            found += taken(order)
        assert found == list(range(1, 21))


def test_the_first_chunk_may_come_last() -> None:
    order: CallOrder[int] = CallOrder()
    for seq_id in (2, 3, 4):
        put(order, seq_id)
        assert not taken(order)
    put(order, 1)
    assert taken(order) == [1, 2, 3, 4]


def test_a_call_without_a_place_gets_the_first_free_one() -> None:
    order: CallOrder[int] = CallOrder()
    put(order, 2)
    put(order, None)
    put(order, None)
    assert taken(order) == [1, 2, 3]


@pytest.mark.parametrize("seq_id", [0, 1, 3])
def test_a_place_is_given_once(seq_id: int) -> None:
    order: CallOrder[int] = CallOrder()
    put(order, 1)
    taken(order)
    put(order, 3)
    with pytest.raises(InvalidValueError, match=f"seq_id {seq_id}"):
        order.check(seq_id)


def test_what_waits_is_bounded_but_the_next_call_is_always_taken() -> None:
    order: CallOrder[int] = CallOrder(max_waiting=2, max_bytes=100)
    put(order, 2, 60)
    with pytest.raises(ServerBusyError):
        order.check(3, 60)
    put(order, 3, 10)
    with pytest.raises(ServerBusyError):
        order.check(4)
    put(order, 1, 1000)
    assert taken(order) == [1, 2, 3]


def test_a_gap_is_given_up_after_a_while_and_the_order_goes_on() -> None:
    now = [0.0]
    order: CallOrder[int] = CallOrder(gap_s=10, now=lambda: now[0])
    now[0] = 100.0  # a run that nobody uses has no gap
    assert order.given_up() == (1, [])
    put(order, 3)
    put(order, 5)
    now[0] += 9
    assert order.given_up() == (1, [])
    now[0] += 2
    assert order.given_up() == (1, [3, 5])
    put(order, 6)
    assert taken(order) == [6]
