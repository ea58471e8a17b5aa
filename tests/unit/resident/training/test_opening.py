"""Opening, loading and saving sessions while the engine serves: what its thread does, and for how long."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from reference.lora import random_adapter, write_adapter

from kt_runtime.errors import ConflictError
from kt_runtime.resident.config import ResidentSettings
from kt_runtime.resident.handlers import SessionHandlers
from kt_runtime.resident.pacing.budget import IDLE_SECONDS
from kt_runtime.resident.server import Resident
from kt_runtime.resident.training import checkpoint, opening
from kt_runtime.resident.twin.lora import LoraModules
from kt_runtime.wire.messages import (
    CloseSession,
    CreateSession,
    Forward,
    GetStatus,
    Load,
    LoraSettings,
    OptimStep,
    Publish,
    Save,
)
from kt_runtime.wire.server import Incoming

LORA = LoraSettings(rank=4, alpha=8.0, targets=["attention"])


def handlers_of(desk: Desk) -> SessionHandlers:
    assert isinstance(desk.resident.handlers, SessionHandlers)
    return desk.resident.handlers


class Desk:
    """A resident on this thread, with a clock in the test's hand; one call of `turn` is one turn of the engine."""

    wakeup_fd = -1

    def __init__(self, host: Any, root: Path, **settings: Any) -> None:
        self.now, self.root = 100.0, root
        self.waiting: list[Incoming] = []
        self.replies: dict[str, Any] = {}
        self.longest = 0.0
        places: dict[str, Any] = {"model": "", "model_directory": "", "wire_address": "", "names_address": ""}
        self.resident = Resident(
            host,
            ResidentSettings(**places, adapter_directory=str(root / "adapters"), **settings),
            self,
            clock=lambda: self.now,
        )

    @property
    def has_pending(self) -> bool:
        return bool(self.waiting)

    def take(self) -> list[Incoming]:
        taken, self.waiting = self.waiting, []
        return taken

    def answer(self, incoming: Incoming, reply: Any, arrays: Any = None) -> None:
        self.replies[incoming.request_id] = reply

    def close(self) -> None:
        pass

    def turn(self) -> None:
        started = self.now
        self.resident.apply(self.resident.decisions())
        self.resident.turn()
        self.longest = max(self.longest, self.now - started)

    def begin(self, kind: Any, arrays: Any = None, **fields: Any) -> str:
        request = kind(request_id=f"r{len(self.replies)}-{time.monotonic_ns()}", **fields)
        self.waiting.append(Incoming(request, arrays or {}, b"", request.request_id))
        return str(request.request_id)

    def until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not done():
            assert time.monotonic() < deadline
            self.turn()

    def wait(self, request_id: str) -> Any:
        self.until(lambda: request_id in self.replies)
        return self.replies[request_id]

    def ask(self, kind: Any, arrays: Any = None, **fields: Any) -> Any:
        return self.wait(self.begin(kind, arrays, **fields))

    def settle(self) -> None:
        """Until only other threads could continue."""
        self.until(lambda: not self.resident.has_work())


@pytest.fixture
def make_desk(make_host: Callable[..., Any], tmp_path: Path) -> Iterator[Callable[..., Desk]]:
    desks: list[Desk] = []

    def make(**settings: Any) -> Desk:
        desks.append(Desk(make_host(), tmp_path, **settings))
        return desks[-1]

    yield make
    for desk in desks:
        desk.resident.close()


@pytest.fixture
def desk(make_desk: Callable[..., Desk]) -> Desk:
    return make_desk()


@pytest.fixture
def adapter(desk: Desk) -> str:
    found = random_adapter(desk.resident._host.config, rank=4, alpha=8.0, seed=2, only=["attention"])
    return str(write_adapter(desk.root / "adapter", found))


class Gate:
    """Blocks one function on whatever thread calls it, and knows those threads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
        self.entered, self.open = threading.Event(), threading.Event()
        self.threads: set[str] = set()
        original = getattr(module, name)

        def waits(*args: Any, **kwargs: Any) -> Any:
            self.threads.add(threading.current_thread().name.rpartition("-")[0])
            self.entered.set()
            assert self.open.wait(60)
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, waits)


def call_of(batch: Any) -> dict[str, Any]:
    arrays = {"tokens": batch.tokens, "targets": batch.targets, "weights": batch.weights}
    return {"arrays": arrays, "lengths": batch.lengths}


def test_files_and_first_values_are_no_business_of_the_engine_s_thread(
    desk: Desk, adapter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gates = [
        Gate(monkeypatch, *place)
        for place in (
            (opening, "read_adapter"),
            (opening, "initial_values"),
            (checkpoint, "read_peft_directory"),
            (checkpoint, "check_target"),
            (checkpoint, "write"),
        )
    ]
    for gate in gates:
        gate.open.set()
    saved = str(desk.root / "saved")
    more = LoraSettings(rank=4, alpha=8.0, targets=["all"])
    desk.ask(CreateSession, session="a", lora=more, start_from=adapter, reference=adapter)
    desk.ask(Save, session="a", path=saved)
    assert desk.ask(Load, session="a", path=saved).info.step == 0
    assert [gate.threads for gate in gates] == [{"kt-prepare"}] * 4 + [{"kt-write"}]


def test_no_turn_is_longer_than_its_budget_and_one_layer_s_slice(
    desk: Desk, adapter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of creating, loading and closing, whatever the number of layers; a layer takes a second here."""
    place, take_away, layers = LoraModules._place_layer, LoraModules._detach, []

    def slow(self: Any, key: str, layer: int, *rest: Any) -> None:
        desk.now += 1.0
        layers.append(layer)
        place(self, key, layer, *rest)

    def slow_too(self: Any, module: Any, key: str) -> None:
        desk.now += 0.2
        take_away(self, module, key)

    monkeypatch.setattr(LoraModules, "_place_layer", slow)
    monkeypatch.setattr(LoraModules, "_detach", slow_too)
    desk.ask(CreateSession, session="a", lora=LORA, start_from=adapter, reference=adapter)
    assert layers == [0, 1, 2] * 2
    assert desk.longest == 1.0
    of_layer = max(
        sum(module.layer == layer for module in handlers_of(desk)._sessions["a"].modules) for layer in range(3)
    )
    desk.longest = 0.0
    desk.ask(CloseSession, session="a")
    assert IDLE_SECONDS < desk.longest <= 0.2 * of_layer + 1e-6


def test_while_one_is_read_others_are_served_and_its_own_requests_wait(
    desk: Desk, adapter: str, make_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch(12)
    desk.ask(CreateSession, session="other", lora=LORA)
    gate = Gate(monkeypatch, opening, "read_adapter")
    create = desk.begin(CreateSession, session="a", lora=LORA, start_from=adapter)
    forward = desk.begin(Forward, session="a", **call_of(batch))
    close = desk.begin(CloseSession, session="a")
    assert desk.ask(Forward, session="other", **call_of(batch)).loss > 0
    desk.settle()
    assert gate.entered.wait(60)
    assert {create, forward, close}.isdisjoint(desk.replies)
    assert [info.session for info in desk.ask(GetStatus, wait_s=0.0).sessions] == ["other"]
    gate.open.set()
    assert desk.wait(close).request_id == close
    assert list(desk.replies)[-3:] == [create, forward, close]
    assert desk.replies[forward].loss > 0
    assert [info.session for info in desk.resident.handlers.infos()] == ["other"]


def test_the_limits_count_a_session_from_the_beginning_of_its_opening(
    make_desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = make_desk(max_sessions=1)
    path = write_adapter(
        desk.root / "adapter", random_adapter(desk.resident._host.config, rank=4, alpha=8.0, seed=2, only=["attention"])
    )
    gate = Gate(monkeypatch, opening, "read_adapter")
    create = desk.begin(CreateSession, session="a", lora=LORA, start_from=str(path))
    desk.settle()
    refused = desk.ask(CreateSession, session="b", lora=LORA)
    assert refused.kind == "ConflictError" and "1 sessions are open" in refused.message
    (path / "adapter_model.safetensors").write_bytes(b"12345")
    gate.open.set()
    assert desk.wait(create).kind == "AdapterError"
    assert desk.ask(CreateSession, session="b", lora=LORA).info.session == "b"  # the one that failed counts no more


def test_a_reference_counts_once_its_size_is_known(make_desk: Callable[..., Desk]) -> None:
    desk = make_desk(session_memory_bytes=16 * 12_000)
    config = desk.resident._host.config
    path = str(write_adapter(desk.root / "adapter", random_adapter(config, rank=16, alpha=8.0, seed=2)))
    small = LoraSettings(rank=1, alpha=8.0, targets=["o_proj"])
    refused = desk.ask(CreateSession, session="a", lora=small, reference=path)
    assert refused.kind == "ConflictError" and "--session-memory" in refused.message
    assert desk.ask(CreateSession, session="a", lora=small).info.session == "a"


def test_a_disk_error_is_said_with_its_path_and_leaves_everything_as_it_was(
    desk: Desk, adapter: str, make_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.ask(CreateSession, session="a", lora=LORA, start_from=adapter)
    before = desk.ask(Forward, session="a", **call_of(make_batch(12))).loss

    def broken(*args: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", broken)
        for reply in (
            desk.ask(CreateSession, session="b", lora=LORA, start_from=adapter),
            desk.ask(Load, session="a", path=adapter),
        ):
            assert (reply.kind, reply.category) == ("RuntimeFault", "server")
            assert reply.message == f"{adapter}: can't be read: Input/output error"
    assert desk.ask(Forward, session="a", **call_of(make_batch(12))).loss == before
    assert desk.ask(Load, session="a", path=str(desk.root / "nothing")).kind == "NotFoundError"
    assert [info.session for info in desk.resident.handlers.infos()] == ["a"]


def test_without_memory_nothing_of_the_session_stays(desk: Desk, adapter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = LoraModules._place_layer

    def full(self: Any, key: str, layer: int, *rest: Any) -> None:
        if key.endswith("reference") and layer == 1:
            raise MemoryError
        place(self, key, layer, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(LoraModules, "_place_layer", full)
        assert "MemoryError" in desk.ask(CreateSession, session="a", lora=LORA, reference=adapter).message
    lora = handlers_of(desk)._lora
    assert lora._modules == lora._parameters == lora._dropouts == {}
    assert desk.ask(CreateSession, session="a", lora=LORA, reference=adapter).info.session == "a"


def test_of_two_that_open_for_one_name_the_later_is_refused(
    desk: Desk, adapter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, opening, "read_adapter")
    first = desk.begin(CreateSession, session="a", lora=LORA, start_from=adapter, publishes="bob")
    desk.settle()
    assert desk.ask(CreateSession, session="b", lora=LORA, publishes="bob").info.publishes == ["bob"]
    gate.open.set()
    refused = desk.wait(first)
    assert "'bob' is published by session 'b'" in refused.message
    assert [info.session for info in desk.resident.handlers.infos()] == ["b"]
    assert set(handlers_of(desk)._lora._modules) == {"s2"}


def test_the_server_ends_while_a_session_is_opened(
    make_host: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk, gate = Desk(make_host(), tmp_path), Gate(monkeypatch, opening, "initial_values")
    create = desk.begin(CreateSession, session="a", lora=LORA)
    desk.settle()
    assert gate.entered.wait(60)
    desk.resident.close()
    gate.open.set()
    assert create not in desk.replies and handlers_of(desk)._openings == {}


@pytest.mark.slow
def test_saves_that_wait_for_the_disk_are_bounded_and_hold_up_no_training(
    desk: Desk, make_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.ask(CreateSession, session="a", lora=LORA)
    gate = Gate(monkeypatch, checkpoint, "write")
    saves = [desk.begin(Save, session="a", path=str(desk.root / f"saved{number}")) for number in range(3)]
    refused = desk.wait(saves[2])
    assert refused.kind == ConflictError.__name__ and "2 saves of it are being written" in refused.message
    assert desk.ask(Forward, session="a", **call_of(make_batch(12))).loss > 0
    gate.open.set()
    assert [desk.wait(save).step for save in saves[:2]] == [0, 0]
    assert desk.ask(Save, session="a", path=str(desk.root / "saved2")).step == 0


@pytest.mark.slow
def test_a_fault_of_the_numbers_is_no_fault_of_ours_in_the_log(
    desk: Desk, make_batch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    from kt_runtime.wire.messages import ForwardBackward

    desk.ask(CreateSession, session="a", lora=LORA)
    desk.ask(ForwardBackward, session="a", **call_of(make_batch(12)))
    next(iter(handlers_of(desk)._sessions["a"].gradient.values())).fill_(float("nan"))
    caplog.clear()
    reply = desk.ask(OptimStep, session="a", learning_rate=1e-2)
    assert (reply.kind, reply.category) == ("NumericsError", "user")
    assert not caplog.records
    assert desk.ask(Publish, session="a", name="bob").name == "bob"
