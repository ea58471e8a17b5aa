"""The resident's end of the names channel against a bare socket, which may answer anything."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from kt_runtime.errors import (
    ConflictError,
    KtError,
    NotFoundError,
    RuntimeFault,
    ServerBusyError,
    ServerUnreachableError,
)
from kt_runtime.wire import codec
from kt_runtime.wire.failures import error_reply
from kt_runtime.wire.names import NamesChannel
from kt_runtime.wire.replies import DoneReply


class Frontend:
    def __init__(self, address: str) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.bind(address)

    def receive(self) -> tuple[bytes, str]:
        """Who sent the next move, and its request id."""
        assert self.socket.poll(60_000), "no move"
        identity, *frames = self.socket.recv_multipart()
        return identity, codec.decode_move(frames)[0].request_id

    def send(self, identity: bytes, frames: list[bytes]) -> None:
        self.socket.send_multipart([identity, *frames])


@pytest.fixture
def frontend(address: str) -> Iterator[Frontend]:
    opened = Frontend(address)
    yield opened
    opened.context.destroy(linger=0)


@pytest.fixture
def make_channel(address: str) -> Iterator[Callable[..., NamesChannel]]:
    opened: list[NamesChannel] = []

    def make(**options: Any) -> NamesChannel:
        opened.append(NamesChannel(address, **options))
        return opened[-1]

    yield make
    for channel in opened:
        channel.close()


def wait_for(channel: NamesChannel, ended: list[Any]) -> None:
    deadline = time.monotonic() + 60
    while not ended and time.monotonic() < deadline:
        channel.wait(1.0)
        channel.poll()


@pytest.mark.parametrize(
    "error, kind, text",
    [
        (NotFoundError("no copy"), ConflictError, "adapter 'a' was not moved: no copy"),
        (ServerBusyError("full"), ServerBusyError, "full"),
        (RuntimeFault("ours"), RuntimeFault, "ours"),
    ],
)
def test_an_error_reply_ends_the_move_at_once(
    frontend: Frontend, make_channel: Callable[..., NamesChannel], error: KtError, kind: type[KtError], text: str
) -> None:
    channel = make_channel()
    ended: list[Any] = []
    channel.send("a", "v", "id-1", ended.append)
    identity, request_id = frontend.receive()
    frontend.send(identity, codec.encode(error_reply(request_id, error)))
    wait_for(channel, ended)
    channel.poll()
    assert [(type(problem), str(problem)) for problem in ended] == [(kind, text)]


@pytest.mark.parametrize(
    "frames",
    [
        [b"no frames of ours"],
        [codec.MAGIC, b"\xc1", b"\x90"],
        codec.encode(DoneReply(request_id="another")),
        codec.encode(error_reply("", RuntimeFault("could not read the id"))),
    ],
)
def test_what_is_no_answer_to_a_move_changes_nothing(
    frontend: Frontend, make_channel: Callable[..., NamesChannel], frames: list[bytes]
) -> None:
    channel = make_channel()
    ended: list[Any] = []
    channel.send("a", "v", "id-1", ended.append)
    identity, request_id = frontend.receive()
    frontend.send(identity, frames)
    channel.wait(60.0)
    channel.poll()
    assert not ended
    frontend.send(identity, codec.encode(DoneReply(request_id=request_id)))
    wait_for(channel, ended)
    assert ended == [None]


def test_the_first_of_two_answers_counts(frontend: Frontend, make_channel: Callable[..., NamesChannel]) -> None:
    channel = make_channel()
    ended: list[Any] = []
    for name in ("a", "b"):
        channel.send(name, "v", "id-1", ended.append)
    (identity, first), (_, second) = frontend.receive(), frontend.receive()
    for request_id, answer in ((first, None), (first, RuntimeFault("late")), (second, None)):
        reply = DoneReply(request_id=request_id) if answer is None else error_reply(request_id, answer)
        frontend.send(identity, codec.encode(reply))
    deadline = time.monotonic() + 60
    while len(ended) < 2 and time.monotonic() < deadline:
        channel.wait(1.0)
        channel.poll()
    assert ended == [None, None]


def test_a_move_that_finds_no_room_is_refused_at_the_next_poll(make_channel: Callable[..., NamesChannel]) -> None:
    channel = make_channel()
    ended: list[Any] = []
    for _ in range(channel.socket.get_hwm() + 100):
        channel.send("a", "v", "id-1", ended.append)
    assert not ended
    channel.poll()
    channel.poll()
    # ZMQ may count the queue's room in steps.
    assert 0 < len(ended) <= 100 and {type(problem) for problem in ended} == {ServerUnreachableError}


def test_a_late_answer_does_not_leave_the_socket_readable(
    frontend: Frontend, make_channel: Callable[..., NamesChannel]
) -> None:
    """The scheduler waits for this socket: it would never rest again."""
    channel = make_channel(timeout_s=0.02, grace_s=0.02)
    ended: list[Any] = []
    channel.send("a", "v", "id-1", ended.append)
    identity, request_id = frontend.receive()
    time.sleep(0.05)
    channel.poll()
    assert len(ended) == 1
    frontend.send(identity, codec.encode(DoneReply(request_id=request_id)))
    assert channel.socket.poll(60_000)
    channel.poll()
    assert not channel.socket.poll(0) and len(ended) == 1
