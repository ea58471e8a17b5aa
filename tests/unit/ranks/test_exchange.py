"""What real ranks send each other: through sockets, and through shared memory."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference.ranks.real_ranks import KINDS, run_ranks

from kt_runtime import _experts
from kt_runtime.errors import InvalidValueError, LostRankError
from kt_runtime.ranks import Exchange
from kt_runtime.ranks.native import NativeExchange
from kt_runtime.ranks.share import Share

COUNTS = [2, 0, 3]  # rows of each rank
BUFFER_BYTES = 1 << 20  # csrc/ranks/shared_exchange.cpp
PATIENCE_SECONDS = 1.0
MINUTE = 60.0  # that only a failure reaches


def rows_of(rank: int) -> torch.Tensor:
    return torch.arange(COUNTS[rank] * 6, dtype=torch.float32).view(-1, 6) + 100 * rank


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32])
def test_columns_of_all_ranks_in_their_order(dtype: torch.dtype, kind: str) -> None:
    def work(exchange: Exchange) -> list[torch.Tensor]:
        own = torch.full((4, 2), exchange.share.rank, dtype=dtype)
        return [exchange.all_columns(own), exchange.all_columns(own[:0])]

    for some, none in run_ranks(3, work, kind):
        assert some.dtype == dtype
        assert torch.equal(some, torch.tensor([[0, 0, 1, 1, 2, 2]], dtype=dtype).expand(4, 6))
        assert none.shape == (0, 6)


@pytest.mark.parametrize("kind", KINDS)
def test_each_rank_gets_its_columns_of_all_rows(kind: str) -> None:
    def work(exchange: Exchange) -> torch.Tensor:
        return exchange.columns_of_rows(rows_of(exchange.share.rank), COUNTS)

    whole = torch.cat([rows_of(rank) for rank in range(3)])
    for rank, found in enumerate(run_ranks(3, work, kind)):
        assert torch.equal(found, whole[:, 2 * rank : 2 * rank + 2])


@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_get_the_rows_of_rank_0(kind: str) -> None:
    """Also where the number of ranks does not divide their columns, and where there are none."""

    def work(exchange: Exchange) -> list[torch.Tensor]:
        rows = torch.arange(10, dtype=torch.int32).view(2, 5)
        own = rows if exchange.share.rank == 0 else rows[:0]
        return [exchange.rows_of_first(own, 2), exchange.rows_of_first(rows[:0], 0)]

    for some, none in run_ranks(3, work, kind):
        assert torch.equal(some, torch.arange(10, dtype=torch.int32).view(2, 5))
        assert none.shape == (0, 5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_messages_of_many_pieces_and_many_messages(kind: str) -> None:
    """Rows that fill two buffers and a part of a third, on one rank only; then one small message after another."""
    rows, columns = 700, 1024
    assert 2 * BUFFER_BYTES < 4 * rows * columns < 3 * BUFFER_BYTES

    def work(exchange: Exchange) -> list[bool]:
        rank = exchange.share.rank
        sent = torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)
        received = exchange.columns_of_rows(sent if rank == 1 else sent[:3], [3, rows])
        own = slice(rank * columns // 2, (rank + 1) * columns // 2)
        right = [torch.equal(received, torch.cat([sent[:3, own], sent[:, own]]))]
        whole = exchange.all_columns(sent + rank)
        right.append(torch.equal(whole, torch.cat([sent, sent + 1], dim=1)))
        for number in range(500):
            found = exchange.all_columns(torch.tensor([[2 * number + rank]]))
            right.append(found.tolist() == [[2 * number, 2 * number + 1]])
        return right

    assert all(all(each) for each in run_ranks(2, work, kind))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_sent_and_how_long_it_took_is_counted(kind: str) -> None:
    """Of two messages to each of two other ranks: two columns of four int32 rows, and a third of each row."""

    def work(exchange: Exchange) -> tuple[int, bool]:
        exchange.all_columns(torch.zeros((4, 2), dtype=torch.int32))
        exchange.columns_of_rows(rows_of(exchange.share.rank), COUNTS)
        return exchange.sent_bytes, exchange.waited_s > 0

    assert run_ranks(3, work, kind) == [(2 * (32 + rows * 8), True) for rows in COUNTS]


def test_a_row_that_fits_no_buffer_is_refused() -> None:
    def work(exchange: Exchange) -> str:
        with pytest.raises(InvalidValueError) as raised:
            exchange.all_columns(torch.zeros((1, BUFFER_BYTES // 4 + 1)))
        return str(raised.value)

    assert (
        run_ranks(2, work, "memory")
        == [f"a row of {BUFFER_BYTES + 4} bytes can't be exchanged; allowed: up to {BUFFER_BYTES}"] * 2
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_do_something_else_do_not_get_each_others_bytes(kind: str) -> None:
    def work(exchange: Exchange) -> str:
        with pytest.raises(LostRankError) as raised:
            exchange.all_columns(torch.zeros((1 + exchange.share.rank, 2)))
        return str(raised.value)

    for message in run_ranks(2, work, kind):
        assert "computes something else than this rank" in message or "given up" in message


def partner(act: Callable[[], None]) -> int:
    """A process that acts, and takes part in no exchange."""
    pid = os.fork()
    if pid == 0:
        act()
        os._exit(0)
    return pid


def with_partner(pid: int, patience_seconds: float = PATIENCE_SECONDS) -> NativeExchange:
    """The exchange of rank 0 with rank 1, which is that process."""
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, _experts.Exchange.file_bytes(2))
    native = _experts.Exchange.shared(descriptor, [os.getpid(), pid], 0, patience_seconds)
    os.close(descriptor)
    return NativeExchange(Share(0, 2), native)


def ends(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_rank_that_has_ended_is_named() -> None:
    pid = partner(lambda: None)
    exchange = with_partner(pid, MINUTE)
    for _ in range(2):  # for good
        with pytest.raises(LostRankError, match=rf"^rank 1 \(process {pid}\) has ended$"):
            exchange.all_columns(torch.zeros((1, 2)))
    os.waitpid(pid, 0)


@pytest.mark.slow
def test_a_rank_that_hangs_is_named() -> None:
    pid = partner(lambda: time.sleep(600))
    exchange = with_partner(pid)
    try:
        with pytest.raises(
            LostRankError, match=rf"^rank 1 \(process {pid}\) computes nothing and has answered nothing"
        ):
            exchange.all_columns(torch.zeros((1, 2)))
    finally:
        ends(pid)


def computes() -> None:
    until = time.process_time() + 1.5 * PATIENCE_SECONDS
    while time.process_time() < until:
        pass


def of_a_computing_rank() -> tuple[str, float]:
    """The error about a rank that computes and ends, and for how many seconds that rank had no processor."""
    began = time.monotonic()
    pid = partner(computes)
    with pytest.raises(LostRankError) as raised:
        with_partner(pid).all_columns(torch.zeros((1, 2)))
    _, _, used = os.wait4(pid, 0)
    return str(raised.value), time.monotonic() - began - used.ru_utime - used.ru_stime


@pytest.mark.slow
def test_a_rank_that_computes_is_waited_for() -> None:
    """Until it ends, which is later than a rank that hangs would have been given up. Tried again, for a minute, where
    it had no processor for about as long as the partner waits: then it computed nothing, and may have been given up.
    """
    deadline = time.monotonic() + MINUTE
    said, without_processor = of_a_computing_rank()
    while not said.endswith("has ended") and without_processor > 0.9 * PATIENCE_SECONDS and time.monotonic() < deadline:
        said, without_processor = of_a_computing_rank()
    assert said.endswith("has ended"), f"{said}; {without_processor:.1f} s without a processor"


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_waited_for() -> None:
    """Until it ends, which is later than a rank that hangs would have been given up."""
    pid = partner(signal.pause)
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)  # it is stopped when it gets a processor
    end_later(pid, 2 * PATIENCE_SECONDS)
    with pytest.raises(LostRankError, match=r"has ended$"):
        with_partner(pid).all_columns(torch.zeros((1, 2)))
    os.waitpid(pid, 0)


def end_later(pid: int, seconds: float) -> None:
    def end() -> None:
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)

    partner(end)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_gives_up_is_named(kind: str) -> None:
    def work(exchange: Exchange) -> Any:
        if exchange.share.rank == 1:
            exchange.native.give_up()
            return None
        with pytest.raises(LostRankError) as raised:
            exchange.all_columns(torch.zeros((1, 2)))
        return str(raised.value)

    message, _ = run_ranks(2, work, kind)
    assert message.startswith("rank 1 (process ") and message.endswith("given up; its own message has the reason")
