"""What servers are tested with: a resident that is only its wire, and a launch that ends before SGLang's server."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import pytest

from kt_runtime.errors import KtError, UnknownNameError
from kt_runtime.resident.config import ENVIRONMENT_VARIABLE, ResidentSettings
from kt_runtime.serve.models.make_model import make_model
from kt_runtime.wire import Incoming, WireServer, error_reply, replies
from kt_runtime.wire import messages as m
from kt_runtime.wire.settings import Settings, changed


class FakeResident:
    """Answers adapter requests from a table in memory, and records them.

    `adapters` maps names to (version, lora_id). `errors` maps a message type to the error it is answered with.
    """

    def __init__(self, directory: Path) -> None:
        self.wire = WireServer(f"ipc://{directory}/resident.sock")
        self.address = self.wire.address
        self.requests: list[Any] = []
        self.adapters: dict[str, tuple[str, str]] = {}
        self.errors: dict[type, KtError] = {}
        self.settings = Settings()
        self.move: Callable[[str, str, str], None] = lambda name, version, lora_id: None
        self.is_silent = self._ended = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended = True
        self._thread.join()
        self.wire.close()

    def received(self, kind: type) -> list[Any]:
        return [request for request in self.requests if isinstance(request, kind)]

    def _run(self) -> None:
        while not self._ended:
            if not self.wire.wait(0.02) or self.is_silent:
                continue
            for incoming in self.wire.take():
                self.requests.append(incoming.request)
                self.wire.answer(incoming, self._reply(incoming))

    def _reply(self, incoming: Incoming) -> replies.Reply:
        request = incoming.request
        try:
            if type(request) in self.errors:
                raise self.errors[type(request)]
            return self._execute(request)
        except KtError as error:
            return error_reply(request.request_id, error)

    def _execute(self, request: Any) -> replies.Reply:
        if isinstance(request, m.GetStatus):
            return _status(request.request_id)
        if isinstance(request, m.ListAdapters):
            infos = [
                replies.AdapterInfo(name=name, current=version, versions=[_version(version, lora_id)])
                for name, (version, lora_id) in self.adapters.items()
            ]
            return replies.AdaptersReply(request_id=request.request_id, adapters=infos)
        if isinstance(request, (m.LoadAdapter, m.FollowAdapter, m.RollbackAdapter)):
            version = f"{len(self.requests):016x}"
            self.adapters[request.name] = (version, f"id-{version}")
            self.move(request.name, version, f"id-{version}")
            return replies.PublishReply(
                request_id=request.request_id,
                name=request.name,
                version=version,
                lora_id=f"id-{version}",
                publish_ms=1.5,
            )
        if isinstance(request, m.ForgetAdapter):
            if request.name not in self.adapters:
                raise UnknownNameError("adapter", request.name, self.adapters)
            return replies.ForgottenReply(request_id=request.request_id, lora_id=self.adapters.pop(request.name)[1])
        if isinstance(request, m.ChangeSettings):
            self.settings = changed(self.settings, request.changes)
            return replies.SettingsReply(request_id=request.request_id, settings=self.settings)
        return replies.DoneReply(request_id=request.request_id)


def _version(version: str, lora_id: str) -> replies.VersionInfo:
    return replies.VersionInfo(version=version, lora_id=lora_id, rank=8, alpha=16.0, source="/a", created_at=0.0)


def _status(request_id: str) -> replies.StatusReply:
    values: dict[str, Any] = {}
    for field, kind in replies.StatusReply.__annotations__.items():
        default: Any = None if kind.endswith(" | None") else []
        values[field] = {"str": "x", "int": 1, "float": 0.5, "bool": True}.get(kind, default)
    return replies.StatusReply(request_id=request_id, **values)


@pytest.fixture
def private_directory() -> Iterator[Path]:
    """0700 and with a short path: a socket's path may have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="kt-test-") as directory:
        yield Path(directory)


@pytest.fixture
def resident(private_directory: Path) -> Iterator[FakeResident]:
    fake = FakeResident(private_directory)
    yield fake
    fake.close()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_model("tiny-qwen3-moe", tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def port() -> Iterator[int]:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        number = opened.getsockname()[1]
    yield number


@pytest.fixture(autouse=True)
def environment_as_before() -> Iterator[None]:
    """`serve` sets variables, such as the network interface of ranks, which later tests' servers would inherit."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Calls of SGLang's server, which is not run: (arguments, frontend, settings in the environment)."""
    from kt_runtime.sglang_patch.frontend import http_server as frontend

    calls: list[Any] = []

    def run(arguments: list[str], ours: Any) -> None:
        settings = msgspec.json.decode(os.environ[ENVIRONMENT_VARIABLE], type=ResidentSettings)
        calls.append(SimpleNamespace(arguments=arguments, frontend=ours, settings=settings, environ=dict(os.environ)))

    monkeypatch.setattr(frontend, "run", run)
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "")
    yield calls
