from __future__ import annotations

import logging
import os
import pickle
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from kt_runtime.errors import RuntimeFault
from kt_runtime.wire import WireServer, codec, messages, replies
from kt_runtime.wire.messages import ForwardBackward, GetStatus, OptimStep
from kt_runtime.wire.replies import DoneReply, ErrorReply, ForwardReply


def batch(*tokens: int) -> dict[str, np.ndarray]:
    return {
        "tokens": np.array(tokens, np.int32),
        "targets": np.array(tokens, np.int32),
        "weights": np.ones(len(tokens), np.float32),
    }


def forward_frames(request_id: str, *tokens: int) -> list[bytes]:
    return codec.encode(ForwardBackward(request_id=request_id, session="s", lengths=[len(tokens)]), batch(*tokens))


def error_of(frames: list[bytes]) -> ErrorReply:
    reply, _ = codec.decode_reply(frames)
    assert isinstance(reply, ErrorReply), reply
    return reply


def take_one(server: WireServer) -> Any:
    assert server.wait(60), "no request arrived"
    taken = server.take()
    assert len(taken) == 1
    return taken[0]


def done(server: WireServer, incoming: Any) -> None:
    server.answer(incoming, DoneReply(request_id=incoming.request_id))


class Canary:
    """Unpickling this creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.path), "w")


def test_a_request_is_taken_once_and_its_answer_arrives(server: WireServer, peer: Any) -> None:
    assert not server.has_pending
    assert not server.wait(0.01)
    assert server.take() == []
    peer.send(forward_frames("a", 5, 6))
    incoming = take_one(server)
    assert not server.has_pending
    np.testing.assert_array_equal(incoming.arrays["tokens"], [5, 6])
    reply = ForwardReply(request_id="a", loss=1.0, num_tokens=2, seconds=0.0)
    server.answer(incoming, reply, {"logprobs": np.array([-1, -2], np.float32)})
    found, arrays = codec.decode_reply(peer.receive())
    assert found == reply
    np.testing.assert_array_equal(arrays["logprobs"], [-1, -2])
    assert server.take() == []


def test_wakeup_fd_is_readable_until_the_request_is_taken(server: WireServer, peer: Any) -> None:
    poller = zmq.Poller()
    poller.register(server.wakeup_fd, zmq.POLLIN)
    assert poller.poll(0) == []
    peer.send(forward_frames("a", 1))
    assert poller.poll(10_000)
    assert server.has_pending
    server.take()
    assert poller.poll(0) == []


def test_an_answer_may_be_given_once_and_only_to_its_own_request(server: WireServer, peer: Any) -> None:
    peer.send(forward_frames("a", 1))
    incoming = take_one(server)
    with pytest.raises(RuntimeFault, match="got a reply to 'b'"):
        server.answer(incoming, DoneReply(request_id="b"))
    done(server, incoming)
    with pytest.raises(RuntimeFault, match="answered already"):
        done(server, incoming)


def test_a_loss_that_is_not_finite_reaches_the_client_as_a_numerics_error(server: WireServer, peer: Any) -> None:
    peer.send(forward_frames("a", 1))
    reply = ForwardReply(request_id="a", loss=float("nan"), num_tokens=1, seconds=0.0)
    server.answer(take_one(server), reply, {"logprobs": np.zeros(1, np.float32)})
    error = error_of(peer.receive())
    assert (error.request_id, error.category, error.kind) == ("a", "user", "NumericsError")
    assert "ForwardReply.loss is nan" in error.message


def test_a_resent_request_gets_the_first_answer_and_is_not_carried_out_again(server: WireServer, peer: Any) -> None:
    peer.send(forward_frames("a", 1))
    done(server, take_one(server))
    first = peer.receive()
    for _ in range(3):
        peer.send(forward_frames("a", 1))
        assert peer.receive() == first
    assert not server.has_pending


def test_a_request_resent_while_in_progress_is_answered_to_who_asked_last(
    server: WireServer, make_peer: Callable[[], Any]
) -> None:
    before, after = make_peer(), make_peer()
    before.send(forward_frames("a", 1))
    incoming = take_one(server)
    after.send(forward_frames("a", 1))
    after.send([b"x"])  # its error reply shows that the resend has been read
    error_of(after.receive())
    done(server, incoming)
    assert codec.decode_reply(after.receive())[0] == DoneReply(request_id="a")
    assert before.is_silent()
    assert not server.has_pending


@pytest.mark.parametrize("answered", [False, True])
def test_an_id_with_another_content_is_a_users_error_and_disturbs_nothing(
    server: WireServer, peer: Any, answered: bool
) -> None:
    peer.send(forward_frames("a", 1))
    incoming = take_one(server)
    if answered:
        done(server, incoming)
        first = peer.receive()
    peer.send(forward_frames("a", 2))
    error = error_of(peer.receive())
    assert (error.category, error.kind) == ("user", "ConflictError")
    assert "different content" in error.message
    assert not server.has_pending
    if answered:
        peer.send(forward_frames("a", 1))
        assert peer.receive() == first
    else:
        done(server, incoming)
        assert codec.decode_reply(peer.receive())[0] == DoneReply(request_id="a")


@pytest.mark.parametrize("options", [{"answers_kept": 2}, {"answers_kept_bytes": 100}], ids=["count", "bytes"])
def test_an_id_whose_answer_was_dropped_is_refused_and_never_carried_out_again(
    make_server: Callable[..., WireServer], make_peer: Callable[[], Any], options: dict[str, int]
) -> None:
    server, peer = make_server(**options), make_peer()
    for request_id in "abcd":
        peer.send(forward_frames(request_id, 1))
        done(server, take_one(server))
        peer.receive()
    peer.send(forward_frames("a", 1))
    assert "no longer kept" in error_of(peer.receive()).message
    peer.send(forward_frames("d", 1))
    assert codec.decode_reply(peer.receive())[0] == DoneReply(request_id="d")
    assert not server.has_pending


def test_answers_out_of_order_reach_their_requests(server: WireServer, peer: Any) -> None:
    for request_id in "abc":
        peer.send(forward_frames(request_id, 1))
    taken: list[Any] = []
    while len(taken) < 3:
        assert server.wait(60)
        taken += server.take()
    assert [incoming.request_id for incoming in taken] == ["a", "b", "c"]
    for incoming in reversed(taken):
        done(server, incoming)
    assert [codec.decode_reply(peer.receive())[0].request_id for _ in range(3)] == ["c", "b", "a"]


def test_requests_beyond_the_limit_get_busy_and_are_not_remembered(
    make_server: Callable[..., WireServer], make_peer: Callable[[], Any]
) -> None:
    server, peer = make_server(max_pending=3), make_peer()
    for number in range(50):
        peer.send(forward_frames(f"r{number}", 1))
    busy = [error_of(peer.receive()) for _ in range(47)]
    assert {(error.category, error.kind) for error in busy} == {("server", "ServerBusyError")}
    assert [error.request_id for error in busy] == [f"r{number}" for number in range(3, 50)]
    taken = server.take()
    assert len(taken) == 3
    done(server, taken[0])
    peer.receive()
    peer.send(forward_frames("r49", 1))
    assert take_one(server).request_id == "r49"


def test_the_bytes_of_waiting_requests_are_bounded(
    make_server: Callable[..., WireServer], make_peer: Callable[[], Any]
) -> None:
    server, peer = make_server(max_pending_bytes=100_000), make_peer()
    large = [1] * 5_000  # 60 kB
    for number in range(20):
        peer.send(forward_frames(f"r{number}", *large))
    assert {error_of(peer.receive()).kind for _ in range(19)} == {"ServerBusyError"}
    assert take_one(server).request_id == "r0"


GOOD = forward_frames("a", 1, 2)
UNKNOWN = {"type": "exec", "version": messages.PROTOCOL_VERSION, "request_id": "a"}
MALFORMED = {
    "one empty frame": ([b""], "", "1 frames"),
    "10 000 frames": ([GOOD[0], GOOD[1], *[b"x"] * 9_998], "a", "10000 frames"),
    "oversized": ([*GOOD[:5], b"x" * 150_000], "a", "bytes; allowed are 16 frames and 100000 bytes"),
    "wrong magic": ([b"GET / HTTP/1.1\r\n", *GOOD[1:]], "", "frame 0"),
    "truncated msgpack": ([GOOD[0], GOOD[1][:-8], *GOOD[2:]], "", "truncated"),
    "unknown type": (
        [
            GOOD[0],
            msgspec.msgpack.encode({"type": "exec", "version": messages.PROTOCOL_VERSION, "request_id": "a"}),
            GOOD[2],
        ],
        "a",
        "exec",
    ),
    "unknown field": (
        [GOOD[0], msgspec.msgpack.encode({**msgspec.to_builtins(GetStatus(request_id="a")), "x": 1}), b"\x90"],
        "a",
        "unknown field",
    ),
    "wrong version": (codec.encode(GetStatus(request_id="a", version=99)), "a", "protocol version 99"),
    "wrong dtype": ([*GOOD[:2], GOOD[2].replace(b"int32", b"int64"), *GOOD[3:]], "a", "int64"),
    "wrong length": ([*GOOD[:3], GOOD[3] + b"\0", *GOOD[4:]], "a", "9 bytes"),
    "NaN": ([*GOOD[:5], b"\xff" * 8], "a", "weights.0. is nan"),
}


@pytest.mark.parametrize("frames, request_id, reason", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_message_gets_an_error_reply_and_nothing_else_happens(
    make_server: Callable[..., WireServer],
    make_peer: Callable[[], Any],
    frames: list[bytes],
    request_id: str,
    reason: str,
) -> None:
    server, peer, other = make_server(max_message_bytes=100_000), make_peer(), make_peer()
    peer.send(frames)
    error = error_of(peer.receive())
    assert (error.category, error.kind, error.request_id) == ("user", "ProtocolError", request_id)
    assert reason.replace(".", "") in error.message.replace("[", "").replace("]", "").replace(".", "")
    assert not server.has_pending
    for sender in (peer, other):
        sender.send(forward_frames(f"after-{id(sender)}", 1))
        done(server, take_one(server))
        assert isinstance(codec.decode_reply(sender.receive())[0], DoneReply)


@pytest.mark.parametrize("position", range(6))
def test_a_pickle_gets_an_error_reply_and_is_not_loaded(
    server: WireServer, peer: Any, tmp_path: Path, position: int
) -> None:
    canary = tmp_path / "loaded"
    peer.send([*GOOD[:position], pickle.dumps(Canary(canary)), *GOOD[position + 1 :]])
    assert error_of(peer.receive()).kind == "ProtocolError"
    assert not canary.exists()
    assert not server.has_pending


def test_a_frame_beyond_twice_the_limit_ends_its_connection_only(
    make_server: Callable[..., WireServer], make_peer: Callable[[], Any]
) -> None:
    server, peer, other = make_server(max_message_bytes=100_000), make_peer(), make_peer()
    peer.send([b"x" * 1_000_000])
    assert peer.is_silent()
    other.send(forward_frames("a", 1))
    done(server, take_one(server))
    other.receive()


def test_each_kind_of_refusal_is_logged_once(server: WireServer, peer: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="kt_runtime.wire"):
        for _ in range(20):
            peer.send([b"junk"])
            peer.send([b"KT0", b"", b""])
        for _ in range(40):
            peer.receive()
    assert len(caplog.records) == 2


def test_a_peer_that_dies_after_asking_disturbs_nobody(server: WireServer, make_peer: Callable[[], Any]) -> None:
    gone, staying = make_peer(), make_peer()
    gone.send(forward_frames("a", 1))
    incoming = take_one(server)
    gone.close()
    done(server, incoming)
    staying.send(forward_frames("a", 1))
    assert codec.decode_reply(staying.receive())[0] == DoneReply(request_id="a")


def test_bytes_that_are_not_zmq_disturb_nobody(server: WireServer, peer: Any) -> None:
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(server.address.removeprefix("ipc://"))
        raw.sendall(b"\xff" + b"\0" * 8 + b"\x01garbage" * 100)
    peer.send(forward_frames("a", 1))
    assert take_one(server).request_id == "a"


def test_a_client_that_does_not_read_is_no_obstacle(server: WireServer, make_peer: Callable[[], Any]) -> None:
    deaf, other = make_peer(), make_peer()
    deaf.socket.setsockopt(zmq.RCVHWM, 1)
    for number in range(500):
        deaf.send([b"junk"] if number % 2 else codec.encode(OptimStep(request_id="x", session="s", learning_rate=0.0)))
    other.send(forward_frames("a", 1))
    taken: list[Any] = []
    while len(taken) < 2:
        assert server.wait(60)
        taken += server.take()
    asked = {incoming.request_id: incoming for incoming in taken}
    assert asked.keys() == {"x", "a"}
    done(server, asked["a"])
    assert isinstance(codec.decode_reply(other.receive())[0], DoneReply)


def test_closing_sends_every_answer_that_was_given(server: WireServer, make_peer: Callable[[], Any]) -> None:
    """Of 30 answers followed by `close`, 3 arrived: a client saw a save fail that had succeeded."""
    peers = [make_peer() for _ in range(3)]
    for number in range(30):
        peers[number % 3].send(forward_frames(f"r{number}", 1))
    logprobs = np.zeros(250_000, np.float32)
    taken: list[Any] = []
    while len(taken) < 30:
        assert server.wait(60)
        taken += server.take()
    for incoming in taken:
        reply = ForwardReply(request_id=incoming.request_id, loss=1.0, num_tokens=1, seconds=0.0)
        server.answer(incoming, reply, {"logprobs": logprobs})
    server.close()
    for number in range(30):
        answer, _ = codec.decode_reply(peers[number % 3].receive(5.0))
        assert isinstance(answer, ForwardReply), answer
        assert answer.request_id == f"r{number}"


def test_closing_tells_who_gets_no_answer(server: WireServer, peer: Any) -> None:
    peer.send(forward_frames("taken", 1))
    take_one(server)
    peer.send(forward_frames("waiting", 1))
    assert server.wait(60)
    server.close()
    found = {reply.request_id: reply for reply in (error_of(peer.receive()) for _ in range(2))}
    assert {reply.kind for reply in found.values()} == {"ServerUnreachableError"}
    assert "the server is shutting down; request 'taken' was not finished" in found["taken"].message
    assert "'waiting' was not executed" in found["waiting"].message


@pytest.mark.slow
def test_closing_waits_for_a_client_that_does_not_read_no_longer_than_its_linger(
    server: WireServer, make_peer: Callable[[], Any]
) -> None:
    deaf, other = make_peer(), make_peer()
    for number in range(200):
        deaf.send(forward_frames(f"d{number}", *[1] * 50_000))
    other.send(forward_frames("o", 1))
    taken: list[Any] = []
    while len(taken) < 201:
        assert server.wait(60)
        taken += server.take()
    for incoming in taken:
        logprobs = np.zeros(len(incoming.arrays["tokens"]), np.float32)
        reply = ForwardReply(request_id=incoming.request_id, loss=1.0, num_tokens=1, seconds=0.0)
        server.answer(incoming, reply, {"logprobs": logprobs})
    closing = threading.Thread(target=server.close, kwargs={"linger_s": 4.0}, daemon=True)
    closing.start()
    closing.join(60)
    assert not closing.is_alive()  # the deaf peer never reads
    assert isinstance(codec.decode_reply(other.receive())[0], ForwardReply)


def test_close_may_be_called_twice_and_leaves_no_descriptor(address: str) -> None:
    WireServer(address).close()
    before = len(os.listdir("/proc/self/fd"))
    server = WireServer(address)
    server.close()
    server.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_taken_request_is_plain_data_that_the_host_can_hand_on_to_other_ranks(server: WireServer, peer: Any) -> None:
    peer.send(codec.encode(messages.Publish(request_id="a", session="s", name="n")))
    incoming = take_one(server)
    assert pickle.loads(pickle.dumps(incoming)).request == incoming.request


def test_an_answer_that_cannot_be_encoded_is_a_server_error_for_the_client(server: WireServer, peer: Any) -> None:
    peer.send(forward_frames("a", 1))
    step: Any = np.int64(3)
    server.answer(take_one(server), replies.OptimReply(request_id="a", step=step, grad_norm=1.0, finished_at=1.0))
    error = error_of(peer.receive())
    assert (error.category, error.kind) == ("server", "RuntimeFault")
    assert "numpy.int64" in error.message


def test_asking_for_the_status_displaces_no_other_answer(
    make_server: Callable[..., WireServer], make_peer: Callable[[], Any]
) -> None:
    server, peer = make_server(answers_kept=2, max_pending=1), make_peer()
    peer.send(forward_frames("a", 1))
    done(server, take_one(server))
    first = peer.receive()
    for number in range(5):
        peer.send(codec.encode(GetStatus(request_id=f"s{number}")))
        done(server, take_one(server))
        peer.receive()
    peer.send(forward_frames("a", 1))
    assert peer.receive() == first
    peer.send(forward_frames("b", 1))
    waiting = take_one(server)
    peer.send(codec.encode(GetStatus(request_id="t")))  # as many as allowed are in progress, but the status is told
    done(server, take_one(server))
    assert codec.decode_reply(peer.receive())[0].request_id == "t"
    done(server, waiting)
