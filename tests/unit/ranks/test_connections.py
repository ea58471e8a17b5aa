"""How ranks of several machines connect, and what they make of whoever else does; a connection that ends or says what
was not expected."""

from __future__ import annotations

import os
import signal
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress

import pytest
import torch

from kt_runtime import _experts
from kt_runtime.errors import LostRankError
from kt_runtime.ranks.connections import GREETING, SECRET_BYTES, Place, connect
from kt_runtime.ranks.native import NativeExchange
from kt_runtime.ranks.share import Share

SECONDS = 60.0
NAMES = ["rank 0 (here)", "rank 1 (there)", "rank 2 (elsewhere)"]
COLUMNS = 1


@pytest.fixture
def kept() -> Iterator[ExitStack]:
    with ExitStack() as kept:
        yield kept


def listening(kept: ExitStack) -> socket.socket:
    return kept.enter_context(socket.create_server(("127.0.0.1", 0)))


def places_of(sockets: list[socket.socket]) -> list[Place]:
    ports = [each.getsockname()[1] for each in sockets]
    return [Place("127.0.0.1", port, 7, bytes([n + 1]) * SECRET_BYTES) for n, port in enumerate(ports)]


def start(pool: ThreadPoolExecutor, sockets: list[socket.socket], rank: int, kept: ExitStack) -> Future[dict[int, str]]:
    """What the rank reads on each connection, when all have written who they are."""

    def work() -> dict[int, str]:
        links: dict[int, socket.socket] = {}
        connect(sockets[rank], places_of(sockets), rank, links, SECONDS)
        for link in links.values():
            kept.enter_context(link)
            link.settimeout(SECONDS)
            link.sendall(str(rank).encode())
        return {other: link.recv(1).decode() for other, link in links.items()}

    return pool.submit(work)


def test_every_rank_is_connected_with_every_other_one_and_strangers_are_left_alone(kept: ExitStack) -> None:
    sockets = [listening(kept) for _ in range(3)]
    places = places_of(sockets)
    greetings = (
        b"",  # says nothing, and stays
        b"GET / HTTP/1.1\r\n\r\n",
        GREETING.pack(1, bytes(SECRET_BYTES), places[1].secret),
        GREETING.pack(1, places[0].secret, bytes(SECRET_BYTES)),
        GREETING.pack(9, places[0].secret, places[1].secret),
        GREETING.pack(0, places[0].secret, places[0].secret),  # no higher rank
    )
    strangers = [kept.enter_context(socket.create_connection(sockets[0].getsockname())) for _ in greetings]
    for stranger, greeting in zip(strangers, greetings, strict=True):
        stranger.sendall(greeting)
    with ThreadPoolExecutor(3) as pool:
        found = [start(pool, sockets, rank, kept) for rank in (2, 1, 0)]
        assert [each.result(SECONDS) for each in reversed(found)] == [
            {1: "1", 2: "2"},
            {0: "0", 2: "2"},
            {0: "0", 1: "1"},
        ]
    for stranger in strangers:
        stranger.settimeout(SECONDS)
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b""  # closed, without an answer


def test_who_listens_without_the_secret_is_no_rank(kept: ExitStack) -> None:
    sockets = [listening(kept), listening(kept)]
    with ThreadPoolExecutor(1) as pool:
        found = start(pool, sockets, 1, kept)
        link, _ = sockets[0].accept()
        with link:
            link.sendall(bytes(SECRET_BYTES))
            with pytest.raises(ConnectionError, match=r"who listens at 127\.0\.0\.1:\d+ is not rank 0"):
                found.result(SECONDS)


def test_a_rank_that_does_not_come_is_named(kept: ExitStack) -> None:
    sockets = [listening(kept), listening(kept)]
    with pytest.raises(TimeoutError, match="rank 1 has not connected"):
        connect(sockets[0], places_of(sockets), 0, {}, 0.1)


def exchange(rank: int, *links: int) -> NativeExchange:
    """`links`: descriptors, which become the exchange's."""
    return NativeExchange(Share(rank, len(links)), _experts.Exchange.connected(rank, links, NAMES[: len(links)]))


def pair() -> tuple[NativeExchange, socket.socket]:
    """Rank 0 of two, and the other end of its connection."""
    ours, theirs = socket.socketpair()
    return exchange(0, -1, ours.detach()), theirs


def header(number: int, kind: int, row_bytes: int, rows: int) -> bytes:
    return struct.pack("=IIQ", number, kind + (row_bytes << 8), row_bytes * rows)


def test_a_message_is_a_header_and_the_rows(kept: ExitStack) -> None:
    here, there = pair()
    kept.enter_context(there)
    there.sendall(header(1, COLUMNS, 8, 3) + bytes(24) + header(2, COLUMNS, 4, 1) + b"\1\0\0\0")  # the next one early
    assert here.all_columns(torch.full((3, 1), -1, dtype=torch.int64)).tolist() == [[-1, 0]] * 3
    assert here.all_columns(torch.full((1, 1), 7, dtype=torch.int32)).tolist() == [[7, 1]]
    assert there.recv(100) == header(1, COLUMNS, 8, 3) + b"\xff" * 24 + header(2, COLUMNS, 4, 1) + b"\7\0\0\0"


@pytest.mark.parametrize(
    "sent",
    [header(2, COLUMNS, 4, 3), header(1, 2, 4, 3), header(1, COLUMNS, 8, 3), header(1, COLUMNS, 4, 2)],
    ids=["number", "kind", "width", "length"],
)
def test_a_message_that_is_not_expected_ends_the_exchange_and_no_row_is_taken(sent: bytes, kept: ExitStack) -> None:
    here, there = pair()
    kept.enter_context(there)
    there.sendall(sent + b"\1" * 24)
    whole = torch.zeros((3, 2), dtype=torch.int32)
    with pytest.raises(LostRankError, match=r"^rank 1 \(there\) computes something else than this rank$"):
        gather(here, whole)
    assert not whole.any()
    assert len(there.recv(100)) == 16 + 12 and there.recv(1) == b""  # the other end hears of it
    with pytest.raises(LostRankError, match="something else"):  # for good
        here.all_columns(torch.zeros((1, 1)))


def gather(here: NativeExchange, whole: torch.Tensor) -> None:
    from kt_runtime.experts.native import capsule, translated_errors

    with translated_errors():
        here.native.gather_columns(capsule(whole, "whole"))


def test_a_rank_that_is_killed_while_it_is_waited_for_is_named() -> None:
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        theirs.recv(16)  # the wait has begun
        os.kill(os.getpid(), signal.SIGKILL)
    theirs.close()
    with pytest.raises(LostRankError, match=r"^rank 1 \(there\) has ended or given up"):
        exchange(0, -1, ours.detach()).all_columns(torch.zeros((1, 2)))
    os.waitpid(pid, 0)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_messages_larger_than_all_buffers_between_do_not_block(num_ranks: int) -> None:
    """Each rank sends before it has received: sockets hold some KiB, messages have a MiB. Rows lie apart."""
    ends: list[list[int]] = [[-1] * num_ranks for _ in range(num_ranks)]
    for a in range(num_ranks):
        for b in range(a):
            both = socket.socketpair()
            for each in both:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            ends[a][b], ends[b][a] = (each.detach() for each in both)
    ranks = [exchange(rank, *links) for rank, links in enumerate(ends)]
    rows = torch.arange(1 << 18, dtype=torch.int32).view(-1, 8)
    with ThreadPoolExecutor(num_ranks) as pool:
        found = list(pool.map(lambda each: each.all_columns(rows + each.share.rank), ranks))
    whole = torch.cat([rows + rank for rank in range(num_ranks)], dim=1)
    assert all(torch.equal(each, whole) for each in found)
