from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from kt_runtime import errors
from kt_runtime.errors import (
    ConflictError,
    InvalidValueError,
    NumericsError,
    ProtocolError,
    RequestTimeoutError,
    RuntimeFault,
    ServerBusyError,
    ServerUnreachableError,
    UnknownNameError,
    UserError,
)
from kt_runtime.wire import Batch, LoraSettings, PreferenceLoss, ResidentClient, WireServer, codec, messages, replies

BATCH = Batch.from_sequences([[1, 2], [3]], [[2, 3], [4]], [[1.0, 0.5], [0.0]])


def test_every_call_returns_what_the_resident_answered(resident: Any, make_client: Callable[..., Any]) -> None:
    client: ResidentClient = make_client()
    assert client.status().sessions[0].session == "s"
    assert client.create_session("s", LoraSettings(rank=8, alpha=16.0), start_from="/a", reference="/b").rank == 8
    for result in (client.forward("s", BATCH, model="base"), client.forward_backward("s", BATCH, activations="retain")):
        assert [list(sequence) for sequence in result.logprobs] == [[-2.0, -3.0], [-4.0]]
        assert result.logprobs[0].dtype == np.float32
        assert (result.loss, result.num_tokens, result.seconds) == (3.5, 3, 0.5)
        assert (result.metrics, result.num_correct, result.num_computed) == ({"logps/chosen": -5.0}, 1, 3)
    assert client.optim_step("s", 1e-4, beta2=0.95, max_grad_norm=1.0).grad_norm == 1.5
    assert client.save("s", "/a", optimizer=False, replace=True).path == "/a"
    assert client.load("s", "/a").session == "s"
    assert client.publish("s", "support").name == "support"
    assert client.load_adapter("support", "/a").version == "v"
    assert client.rollback_adapter("support", "ab").name == "support"
    assert client.list_adapters()[0].versions[0].lora_id == "i"
    assert client.change_settings(train_share=0.25).train_share == 0.25
    client.close_session("s")
    sent = {type(request) for request in resident.executed}
    of_the_frontend = {messages.ForgetAdapter, messages.DropAdapter, messages.FollowAdapter}
    assert sent == set(messages.AnyRequest.__args__) - of_the_frontend
    step = next(request for request in resident.executed if isinstance(request, messages.OptimStep))
    assert (step.beta1, step.beta2, step.max_grad_norm) == (0.9, 0.95, 1.0)
    created, forward, backward = resident.executed[1:4]
    assert (created.reference, forward.model, backward.activations) == ("/b", "base", "retain")


def test_a_preference_loss_travels_with_its_reference(resident: Any, make_client: Callable[..., Any]) -> None:
    client: ResidentClient = make_client()
    loss = PreferenceLoss(kind="ipo", beta=0.1)
    client.forward("s", BATCH, loss, reference=[-1.5, -2.5])
    ticket = client.begin_forward("s", BATCH, loss, model="reference")
    assert client.finish_forward(ticket, BATCH).num_tokens == 3
    client.forward_backward("s", BATCH, loss, reference=np.array([-1.5, -2.5]))
    assert [request.loss for request in resident.executed] == [loss] * 3
    with pytest.raises(ProtocolError, match="this message carries"):
        client.forward_backward("s", BATCH, loss)


@pytest.mark.parametrize(
    "error",
    [
        ConflictError("session 's' exists"),
        UnknownNameError("session", "t", ["s"]),
        InvalidValueError("rank 0"),
        errors.NotFoundError("no /a"),
        errors.AdapterError("rank 64 above 16"),
        NumericsError("gradient is inf"),
        RuntimeFault("ours"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_reply_raises_the_same_class_with_the_same_message(
    make_resident: Callable[..., Any], make_client: Callable[..., Any], error: errors.KtError
) -> None:
    make_resident({"Publish": error})
    with pytest.raises(type(error)) as caught:
        make_client().publish("s", "a")
    assert type(caught.value) is type(error)
    assert str(caught.value) == str(error)


def test_nothing_listening_is_an_error_at_once_that_names_the_address(address: str) -> None:
    with pytest.raises(ServerUnreachableError, match=address):
        ResidentClient(address)
    with pytest.raises(InvalidValueError, match=r"'tcp://127\.0\.0\.1:1': must be ipc://"):
        ResidentClient("tcp://127.0.0.1:1")


def test_a_socket_file_left_by_a_dead_server_is_unreachable(address: str) -> None:
    path = Path(address.removeprefix("ipc://"))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    with pytest.raises(ServerUnreachableError, match="refused"):
        ResidentClient(address)


@pytest.mark.slow
def test_a_server_that_dies_while_asked_is_noticed_before_the_timeout(address: str) -> None:
    program = (
        "import sys, time; from kt_runtime.wire import WireServer; server = WireServer(sys.argv[1]); "
        "print('up', flush=True); server.wait(30); print('asked', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program, address], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        with ResidentClient(address, timeout_s=60, resend_s=0.2) as client:
            ticket = client.submit(messages.GetStatus(request_id="a"))
            assert process.stdout.readline() == "asked\n"
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            with pytest.raises(ServerUnreachableError, match=address):
                client.wait(ticket)


def test_no_answer_within_the_timeout_is_an_error_and_the_ticket_stays_valid(
    server: WireServer, make_client: Callable[..., Any], make_resident: Callable[..., Any]
) -> None:
    client = make_client(timeout_s=0.2)
    ticket = client.submit(messages.GetStatus(request_id="a"))
    with pytest.raises(RequestTimeoutError, match=r"GetStatus \(a\) within 0.2 s; it may still be executed"):
        client.wait(ticket)
    make_resident()
    reply, _ = client.wait(ticket, timeout_s=60)
    assert isinstance(reply, replies.StatusReply)


class DroppingProxy:
    """Between client and server; loses the first `num_lost` answers. `asked` is set by each request that arrives."""

    def __init__(self, address: str, server_address: str, num_lost: int) -> None:
        self.address, self.num_lost, self.num_asked = address, num_lost, 0
        self.asked = threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._front, self._back = self._context.socket(zmq.ROUTER), self._context.socket(zmq.DEALER)
        self._front.bind(address)
        self._back.connect(server_address)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        identity = b""
        while not self._stop.is_set():
            if self._front.poll(5):
                identity, *frames = self._front.recv_multipart()
                self.num_asked += 1
                self._back.send_multipart(frames)
                self.asked.set()
            if self._back.poll(5):
                frames = self._back.recv_multipart()
                if self.num_lost > 0:
                    self.num_lost -= 1
                else:
                    self._front.send_multipart([identity, *frames])

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._context.destroy(linger=0)


@pytest.fixture
def make_proxy(server: WireServer, socket_directory: Path) -> Iterator[Callable[[int], DroppingProxy]]:
    """Before `server`; it loses this many answers."""
    with contextlib.ExitStack() as opened:

        def make(num_lost: int) -> DroppingProxy:
            proxy = DroppingProxy(f"ipc://{socket_directory}/proxy.sock", server.address, num_lost)
            opened.callback(proxy.close)
            return proxy

        yield make


def test_a_resent_request_is_carried_out_once(
    server: WireServer, make_proxy: Callable[[int], DroppingProxy], make_client: Callable[..., Any]
) -> None:
    """The client asks many times before the first answer; all but the first are the server's to recognise."""
    proxy = make_proxy(0)
    client = make_client(proxy.address, resend_s=0.01)
    executed: list[str] = []

    def answer_late() -> None:
        assert server.wait(60)
        while proxy.num_asked < 5:
            proxy.asked.wait(60)
            proxy.asked.clear()
        while server.wait(0.1 if len(executed) >= 2 else 60):
            for incoming in server.take():
                executed.append(incoming.request_id)
                server.answer(incoming, replies.DoneReply(request_id=incoming.request_id))

    thread = threading.Thread(target=answer_late)
    thread.start()
    client.close_session("s")
    client.close_session("t")
    thread.join()
    assert executed == [f"{client.client_id}-1", f"{client.client_id}-2"]


def test_a_lost_answer_is_asked_for_again_and_the_request_carried_out_once(
    resident: Any, make_proxy: Callable[[int], DroppingProxy], make_client: Callable[..., Any]
) -> None:
    proxy = make_proxy(3)
    client = make_client(proxy.address, resend_s=0.05)
    assert client.optim_step("s", 1e-3).step == 4
    assert proxy.num_asked >= 4
    assert len(resident.executed) == 1


def test_forward_backward_calls_may_be_under_way_together_and_are_summed_before_the_step(
    resident: Any, make_client: Callable[..., Any]
) -> None:
    client = make_client()
    tickets = [client.begin_forward_backward("s", BATCH) for _ in range(10)]
    client.optim_step("s", 1e-3)
    kinds = [type(request).__name__ for request in resident.executed]
    assert kinds == ["ForwardBackward"] * 10 + ["OptimStep"]
    assert [client.finish_forward(ticket, BATCH).loss for ticket in reversed(tickets)] == [3.5] * 10


def test_no_step_is_sent_when_a_pipelined_call_before_it_failed(
    make_resident: Callable[..., Any], make_client: Callable[..., Any]
) -> None:
    resident, client = make_resident({"ForwardBackward": NumericsError("loss is nan")}), make_client()
    client.begin_forward_backward("s", BATCH)
    with pytest.raises(NumericsError, match="loss is nan"):
        client.optim_step("s", 1e-3)
    assert [type(request).__name__ for request in resident.executed] == ["ForwardBackward"]
    assert client.optim_step("s", 1e-3).step == 4


@pytest.mark.slow
def test_a_busy_server_is_asked_again_until_it_has_room(
    make_server: Callable[..., WireServer], make_resident: Callable[..., Any], make_client: Callable[..., Any]
) -> None:
    server, client = make_server(max_pending=1), make_client()
    tickets = [client.begin_forward_backward("s", BATCH) for _ in range(4)]
    with pytest.raises(ServerBusyError):
        for _ in range(600):
            with contextlib.suppress(RequestTimeoutError):
                client.wait(tickets[-1], timeout_s=0.05)
    make_resident(on=server)
    assert [client.finish_forward(ticket, BATCH).num_tokens for ticket in tickets] == [3] * 4


def test_a_server_that_stays_busy_is_a_busy_error(
    make_server: Callable[..., WireServer], make_client: Callable[..., Any]
) -> None:
    make_server(max_pending=1)
    client = make_client(timeout_s=0.1)
    client.begin_forward_backward("s", BATCH)
    with pytest.raises(ServerBusyError, match="in progress"):
        for _ in range(600):
            with contextlib.suppress(RequestTimeoutError):  # on a busy machine no answer at all may come in time
                client.forward("s", BATCH)


@pytest.mark.parametrize(
    "call, reason",
    [
        (lambda client: client.publish("s", "../x"), "name"),
        (lambda client: client.optim_step("s", -1.0), "learning_rate"),
        (lambda client: client.optim_step("s", float("nan")), "learning_rate is nan"),
        (lambda client: client.create_session("s", LoraSettings(rank=0, alpha=1.0)), "rank"),
    ],
)
def test_an_invalid_request_is_refused_before_it_is_sent(
    server: WireServer, make_client: Callable[..., Any], call: Callable[[Any], Any], reason: str
) -> None:
    with pytest.raises((ProtocolError, InvalidValueError), match=reason):
        call(make_client())
    assert not server.wait(0.05)


def test_a_batch_above_the_limit_is_refused_before_it_is_sent(
    server: WireServer, make_client: Callable[..., Any]
) -> None:
    large = Batch.from_sequences([[1] * 1000], [[1] * 1000])
    with pytest.raises(ProtocolError, match="at most 10000 are allowed"):
        make_client(max_message_bytes=10_000).forward("s", large)


def test_an_answer_of_another_kind_is_a_protocol_error(server: WireServer, make_client: Callable[..., Any]) -> None:
    client = make_client()
    ticket = client.begin_forward_backward("s", BATCH)
    assert server.wait(60)
    (incoming,) = server.take()
    server.answer(incoming, replies.DoneReply(request_id=incoming.request_id))
    with pytest.raises(ProtocolError, match="DoneReply, not ForwardReply"):
        client.finish_forward(ticket, BATCH)


def test_too_few_logprobs_are_a_protocol_error(server: WireServer, make_client: Callable[..., Any]) -> None:
    client = make_client()
    ticket = client.begin_forward_backward("s", BATCH)
    assert server.wait(60)
    (incoming,) = server.take()
    reply = replies.ForwardReply(request_id=incoming.request_id, loss=0.0, num_tokens=3, seconds=0.0)
    server.answer(incoming, reply, {"logprobs": np.zeros(2, np.float32)})
    with pytest.raises(ProtocolError, match="2 logprobs for 3 targets"):
        client.finish_forward(ticket, BATCH)


def test_two_clients_do_not_see_each_others_answers(resident: Any, make_client: Callable[..., Any]) -> None:
    first, second = make_client(), make_client()
    assert first.client_id != second.client_id
    tickets = [(client, client.begin_forward_backward("s", BATCH)) for client in (first, second) * 5]
    for client, ticket in tickets:
        assert client.finish_forward(ticket, BATCH).loss == 3.5
    assert len(resident.executed) == 10


class Forwarder:
    """Copies bytes between two socket files, as `ssh -L LOCAL.sock:REMOTE.sock` does."""

    def __init__(self, local: Path, remote: str) -> None:
        self._remote, self._is_open = remote, True
        self._threads: list[threading.Thread] = []
        self._connections: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(local))
        self._listener.listen()
        self._listener.settimeout(0.05)
        self._start(self._accept)

    def _start(self, function: Callable[..., None], *arguments: Any) -> None:
        self._threads.append(threading.Thread(target=function, args=arguments))
        self._threads[-1].start()

    def _accept(self) -> None:
        while self._is_open:
            with contextlib.suppress(TimeoutError):
                near, _ = self._listener.accept()
                far = socket.socket(socket.AF_UNIX)
                far.connect(self._remote.removeprefix("ipc://"))
                self._connections += [near, far]
                for pair in ((near, far), (far, near)):
                    self._start(self._copy, *pair)

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        """A peer that closes without having read all resets the connection: that ends the other one, too."""
        with contextlib.suppress(OSError):
            try:
                while received := source.recv(65536):
                    target.sendall(received)
            finally:
                target.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """After the client has closed: the copying threads then end."""
        self._is_open = False
        for thread in self._threads:
            thread.join()
        for opened in (self._listener, *self._connections):
            opened.close()


def test_a_client_may_reach_the_resident_through_a_forwarded_socket(
    resident: Any, server: WireServer, socket_directory: Path
) -> None:
    local = socket_directory / "forwarded.sock"
    forwarder = Forwarder(local, server.address)
    try:
        with ResidentClient(f"ipc://{local}", timeout_s=60) as client:
            assert client.forward("s", BATCH).num_tokens == 3
            assert client.optim_step("s", 1e-3).step == 4
    finally:
        forwarder.close()
    assert [type(request).__name__ for request in resident.executed] == ["Forward", "OptimStep"]


def test_an_error_without_a_request_id_is_raised(address: str) -> None:
    """A server of another protocol may not even find the id."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(address)
    try:
        with ResidentClient(address, timeout_s=60) as client:
            ticket = client.submit(messages.GetStatus(request_id="a"))
            identity = router.recv_multipart()[0]
            reply = replies.ErrorReply(request_id="", category="user", kind="FromTheFuture", message="no")
            router.send_multipart([identity, *codec.encode(reply)])
            with pytest.raises(UserError, match="no") as caught:
                client.wait(ticket)
            assert type(caught.value) is UserError
    finally:
        context.destroy(linger=0)
