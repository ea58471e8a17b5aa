"""Peers that speak ZMQ's own protocol by hand, and break it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from kt_runtime.wire import WireServer, codec
from kt_runtime.wire.messages import GetStatus

# The start of a ZMTP 3.0 connection (ZMQ RFC 23) of a DEALER without security.
ZMTP_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
ZMTP_METADATA = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER"
ZMTP_READY = bytes([4, len(ZMTP_METADATA)]) + ZMTP_METADATA
GOOD = codec.encode(GetStatus(request_id="a"))


@pytest.fixture
def raw_peer(server: WireServer) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(60)
        raw.connect(server.address.removeprefix("ipc://"))
        raw.sendall(ZMTP_GREETING)
        received = b""
        while len(received) < 64:
            received += raw.recv(64 - len(received))
        raw.sendall(ZMTP_READY)
        assert b"ROUTER" in raw.recv(256)
        yield raw


def test_a_peer_that_dies_between_two_frames_leaves_nothing(
    server: WireServer, peer: Any, raw_peer: socket.socket
) -> None:
    for frame in GOOD[:-1]:
        raw_peer.sendall(bytes([1, len(frame)]) + frame)  # "more follows"
    raw_peer.close()
    peer.send(codec.encode(GetStatus(request_id="b")))
    assert server.wait(60)
    assert [incoming.request_id for incoming in server.take()] == ["b"]
    assert not server.wait(0.2)


def test_a_whole_message_over_the_same_raw_connection_arrives(server: WireServer, raw_peer: socket.socket) -> None:
    for frame in GOOD[:-1]:
        raw_peer.sendall(bytes([1, len(frame)]) + frame)
    raw_peer.sendall(bytes([0, len(GOOD[-1])]) + GOOD[-1])
    assert server.wait(60)
    assert [incoming.request_id for incoming in server.take()] == ["a"]


def test_a_frame_of_2_gb_is_refused_when_it_is_announced(server: WireServer, raw_peer: socket.socket) -> None:
    raw_peer.sendall(b"\x02" + (2**31).to_bytes(8, "big"))
    assert raw_peer.recv(1) == b""  # the connection is closed, nothing is read
    assert not server.has_pending
