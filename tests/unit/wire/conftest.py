"""A real server on a private ipc:// address, and a stand-in for the resident that answers everything."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from kt_runtime.wire import Incoming, ResidentClient, WireServer, messages, replies
from kt_runtime.wire.failures import error_reply
from kt_runtime.wire.settings import Settings, changed
from kt_runtime.wire.status import ExpertStreaming, GpuExperts, KeptRoutes, SessionInfo, TrainingTurns

SESSION_INFO = SessionInfo(session="s", rank=8, alpha=16.0, step=3, modules=["q_proj"], num_parameters=64)
SAMPLES: dict[Any, Any] = {str: "tiny", int: 2**40, float: 0.5, bool: True}
STATUS = {f.name: SAMPLES.get(f.type, []) for f in msgspec.structs.fields(replies.StatusReply)}
STATUS["sessions"] = [SESSION_INFO]
STATUS["expert_streaming"] = ExpertStreaming(
    threshold_tokens=96, measured=True, chunk_experts=4, ring_bytes=1 << 20, forward_tokens=12, backward_tokens=5
)
STATUS["gpu_experts"] = GpuExperts(
    size_bytes=6000,
    slot_bytes=1000,
    slots=4,
    pinned=1,
    resident={1: [0, 3], 2: []},
    decode_steps=9,
    hits=30,
    misses=10,
    hit_rate=0.75,
    moves=2,
    moved_bytes=2000,
)
STATUS["kept_routes"] = KeptRoutes(
    size_bytes=1 << 20, capacity_tokens=900, tokens=800, dropped_tokens=5, found_tokens=60, missed_tokens=7
)
SETTINGS = Settings(tpot_target_ms=40.0, weights={"s": 2.0})
STATUS["training_turns"] = TrainingTurns(
    settings=SETTINGS,
    tpot_p50_ms=20.0,
    tpot_p95_ms=30.0,
    ttft_p50_ms=100.0,
    ttft_p95_ms=200.0,
    num_requests=7,
    share_used=0.25,
    serving_s=3.0,
    training_s=4.0,
    budget_ms=None,
    slices=100,
    parts=50,
)


class FakeResident:
    """Carries requests out on a thread of its own, as the scheduler would. `executed` lists them in order."""

    def __init__(self, server: WireServer, failing: dict[str, Exception] | None = None) -> None:
        self.server, self.failing = server, failing or {}
        self.executed: list[messages.AnyRequest] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            if self.server.wait(0.02):
                for incoming in self.server.take():
                    self.executed.append(incoming.request)
                    self.server.answer(incoming, *self.reply(incoming))

    def reply(self, incoming: Incoming) -> tuple[replies.Reply, dict[str, np.ndarray]]:
        request, request_id = incoming.request, incoming.request_id
        if error := self.failing.get(type(request).__name__):
            return error_reply(request_id, error), {}
        match request:
            case messages.GetStatus():
                return replies.StatusReply(**{**STATUS, "request_id": request_id}), {}
            case messages.CreateSession() | messages.Load():
                return replies.SessionReply(request_id=request_id, info=SESSION_INFO), {}
            case messages.Forward() | messages.ForwardBackward():
                logprobs = -incoming.arrays["targets"].astype(np.float32)
                loss = float((-logprobs * incoming.arrays["weights"]).sum())
                reply = replies.ForwardReply(
                    request_id=request_id,
                    loss=loss,
                    num_tokens=len(logprobs),
                    seconds=0.5,
                    metrics={"logps/chosen": -5.0},
                    num_correct=1,
                    num_computed=3,
                )
                return reply, {"logprobs": logprobs}
            case messages.OptimStep():
                return replies.OptimReply(request_id=request_id, step=4, grad_norm=1.5, finished_at=1e9), {}
            case messages.Save(path=path):
                return replies.SavedReply(request_id=request_id, path=path, content_hash="ff", step=4), {}
            case messages.Publish(name=name) | messages.LoadAdapter(name=name) | messages.RollbackAdapter(name=name):
                published = replies.PublishReply(
                    request_id=request_id, name=name, version="v", lora_id="i", publish_ms=2.0
                )
                return published, {}
            case messages.ListAdapters():
                version = replies.VersionInfo(
                    version="v", lora_id="i", rank=8, alpha=16.0, source="session s", created_at=1e9
                )
                adapter = replies.AdapterInfo(name="a", current="v", versions=[version])
                return replies.AdaptersReply(request_id=request_id, adapters=[adapter]), {}
            case messages.ChangeSettings(changes=changes):
                return replies.SettingsReply(request_id=request_id, settings=changed(SETTINGS, changes)), {}
            case messages.ForgetAdapter():
                return replies.ForgottenReply(request_id=request_id, lora_id="i"), {}
            case _:
                return replies.DoneReply(request_id=request_id), {}

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


class Peer:
    """A bare DEALER socket that may send anything."""

    def __init__(self, address: str) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.connect(address)

    def send(self, frames: list[bytes]) -> None:
        self.socket.send_multipart(frames)

    def receive(self, timeout_s: float = 60.0) -> list[bytes]:
        assert self.socket.poll(int(timeout_s * 1000)), "no answer"
        return self.socket.recv_multipart()

    def is_silent(self, timeout_s: float = 0.3) -> bool:
        return not self.socket.poll(int(timeout_s * 1000))

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """A server or resident that a test leaves running is a failure, not a hang."""
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


@pytest.fixture
def socket_directory() -> Iterator[Path]:
    """Short, for a socket's path may have 107 bytes only, and 0700."""
    with tempfile.TemporaryDirectory(prefix="kt") as name:
        os.chmod(name, 0o700)
        yield Path(name)


@pytest.fixture
def address(socket_directory: Path) -> str:
    return f"ipc://{socket_directory}/r.sock"


@pytest.fixture
def make_server(address: str) -> Iterator[Callable[..., WireServer]]:
    opened: list[WireServer] = []

    def make(at: str = address, **options: Any) -> WireServer:
        opened.append(WireServer(at, **options))
        return opened[-1]

    yield make
    for server in opened:
        server.close()


@pytest.fixture
def server(make_server: Callable[..., WireServer]) -> WireServer:
    return make_server()


@pytest.fixture
def make_resident(
    request: pytest.FixtureRequest, make_server: Callable[..., WireServer]
) -> Iterator[Callable[..., FakeResident]]:
    """On the fixture `server`, unless another one is given; `make_server` is named so as to end after this."""
    started: list[FakeResident] = []

    def make(failing: dict[str, Exception] | None = None, on: WireServer | None = None) -> FakeResident:
        started.append(FakeResident(on or request.getfixturevalue("server"), failing))
        return started[-1]

    yield make
    for resident in started:
        resident.stop()


@pytest.fixture
def resident(make_resident: Callable[..., FakeResident]) -> FakeResident:
    return make_resident()


@pytest.fixture
def make_client(address: str) -> Iterator[Callable[..., ResidentClient]]:
    opened: list[ResidentClient] = []

    def make(at: str = address, **options: Any) -> ResidentClient:
        opened.append(ResidentClient(at, **{"timeout_s": 60.0, **options}))
        return opened[-1]

    yield make
    for client in opened:
        client.close()


@pytest.fixture
def make_peer(address: str) -> Iterator[Callable[..., Peer]]:
    opened: list[Peer] = []

    def make(at: str = address) -> Peer:
        opened.append(Peer(at))
        return opened[-1]

    yield make
    for peer in opened:
        peer.close()


@pytest.fixture
def peer(server: WireServer, make_peer: Callable[..., Peer]) -> Peer:
    return make_peer()
