"""Our HTTP routes against a resident that is real on the wire and on the names channel, and fake behind them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import zmq
import zmq.asyncio
from fastapi import FastAPI

from kt_runtime.errors import (
    AdapterError,
    ConflictError,
    NumericsError,
    RequestTimeoutError,
    RuntimeFault,
    ServerBusyError,
)
from kt_runtime.serve.http import adapters as adapters_module
from kt_runtime.serve.http.adapters import Adapters, drop_adapter
from kt_runtime.serve.http.names import NamesServer
from kt_runtime.serve.http.routes import adapter_routes, registry_routes, settings_routes
from kt_runtime.serve.http.settings import RunningSettings
from kt_runtime.sglang_patch.frontend.registry import VersionedRegistry
from kt_runtime.wire import codec, error_reply, replies
from kt_runtime.wire import messages as m
from kt_runtime.wire.async_client import AsyncResidentClient
from kt_runtime.wire.names import NamesChannel


class Frontend(SimpleNamespace):
    http: httpx.AsyncClient
    registry: VersionedRegistry
    adapters: Adapters


@contextlib.asynccontextmanager
async def frontend(resident: Any, directory: Path) -> AsyncIterator[Frontend]:
    registry, calls = VersionedRegistry(), AsyncResidentClient(resident.address)
    names_address = f"ipc://{directory}/names.sock"
    resident.move = lambda name, version, lora_id: move_and_wait(names_address, name, version, lora_id)
    async with NamesServer(names_address, registry, lambda lora_id: drop_adapter(calls, lora_id)) as names:
        adapters = Adapters(calls, names, lambda: 3, "/the/adapters")
        app = FastAPI()
        app.include_router(adapter_routes(adapters))
        app.include_router(settings_routes(RunningSettings(calls)))
        app.include_router(registry_routes(adapters))
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            yield Frontend(http=http, registry=registry, adapters=adapters)
    calls.close()


def move_and_wait(address: str, name: str, version: str, lora_id: str) -> None:
    channel = NamesChannel(address)
    ended: list[Any] = []
    channel.send(name, version, lora_id, ended.append)
    deadline = time.monotonic() + 60
    while not ended and time.monotonic() < deadline:
        channel.poll()
        time.sleep(0.001)
    channel.close()
    assert ended == [None]


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


def test_adapter_is_loaded_moved_shown_rolled_back_and_taken_away(resident: Any, private_directory: Path) -> None:
    async def scenario() -> None:
        async with frontend(resident, private_directory) as front:
            answer = (await front.http.post("/kt/adapters", json={"name": "a", "path": str(private_directory)})).json()
            first = answer["lora_id"]
            assert answer == {"name": "a", "version": answer["version"], "lora_id": first, "publish_ms": 1.5}
            assert front.registry.names() == {"a": first}
            assert resident.received(m.LoadAdapter)[0].path == str(private_directory)
            await front.registry.acquire("a")
            shown = (await front.http.get("/kt/adapters/a")).json()
            assert shown["current"] == answer["version"] and shown["versions"][0]["in_flight"] == 1

            answer = (await front.http.post("/kt/adapters/a/rollback", json={"version": "abcd"})).json()
            assert front.registry.names() == {"a": answer["lora_id"]} and answer["lora_id"] != first
            assert resident.received(m.RollbackAdapter)[0].adapter_version == "abcd"
            status = (await front.http.get("/kt/status")).json()
            assert status["draining"] == {first: 1} and status["requests_in_flight"] == 3
            assert status["adapter_directory"] == "/the/adapters"
            assert status["wire_address"] == resident.address and status["adapters"] == front.registry.names()
            assert not resident.received(m.DropAdapter)
            await front.registry.release(first)
            await until(lambda: [r.lora_id for r in resident.received(m.DropAdapter)] == [first])

            assert (await front.http.post("/kt/adapters/a/rollback")).status_code == 200  # no body: the version before
            assert resident.received(m.RollbackAdapter)[1].adapter_version is None
            gone = await front.http.delete("/kt/adapters/a")
            assert gone.json() == {"name": "a", "in_flight": 0} and front.registry.names() == {}
            assert resident.received(m.ForgetAdapter)[0].name == "a"
            assert (await front.http.get("/kt/adapters")).json() == {"adapters": []}
            await until(lambda: len(resident.received(m.DropAdapter)) == 3)

    asyncio.run(scenario())


def test_unknown_adapter_is_404_with_the_known_names(resident: Any, private_directory: Path) -> None:
    resident.adapters = {"alpha": ("v", "id")}

    async def scenario() -> None:
        async with frontend(resident, private_directory) as front:
            for answer in (await front.http.get("/kt/adapters/alpa"), await front.http.delete("/kt/adapters/alpa")):
                error = answer.json()["error"]
                assert answer.status_code == 404 and error["kind"] == "UnknownNameError" and "alpha" in error["message"]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (AdapterError("layer 3: no lora_B"), 400),
        (ConflictError("no room"), 409),
        (RuntimeFault("broken"), 500),
        (NumericsError("NaN"), 500),
    ],
)
def test_errors_of_the_resident_keep_their_kind(
    resident: Any, private_directory: Path, error: Exception, status: int
) -> None:
    resident.errors[m.LoadAdapter] = error

    async def scenario() -> None:
        async with frontend(resident, private_directory) as front:
            answer = await front.http.post("/kt/adapters", json={"name": "a", "path": str(private_directory)})
            assert answer.status_code == status
            assert answer.json() == {"error": {"message": str(error), "kind": type(error).__name__}}
            assert front.registry.names() == {}

    asyncio.run(scenario())


@pytest.mark.parametrize("path", ["", "a\0b", "x" * 5000])
def test_what_is_no_path_never_reaches_the_resident(resident: Any, private_directory: Path, path: str) -> None:
    async def scenario() -> None:
        async with frontend(resident, private_directory) as front:
            answer = await front.http.post("/kt/adapters", json={"name": "a", "path": path})
            assert answer.status_code == 400 and not resident.requests

    asyncio.run(scenario())


@pytest.mark.parametrize("path", ["someone/adapter", "/no/such/directory", "../../../../no-such", "/proc/self/exe"])
def test_the_event_loop_does_not_look_at_paths(
    resident: Any, private_directory: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network mount that does not answer would hold up every request; the resident looks, on a worker."""
    looked_at: list[object] = []
    stat = os.stat

    def seen(place: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        looked_at.append(place)
        return stat(place, *args, **kwargs)

    async def scenario() -> None:
        async with frontend(resident, private_directory) as front:
            monkeypatch.setattr(os, "stat", seen)
            await front.http.post("/kt/adapters", json={"name": "a", "path": path})
            (request,) = resident.received(m.LoadAdapter)
            assert request.path == os.path.abspath(path) and request.path not in map(str, looked_at)

    asyncio.run(scenario())


@pytest.mark.parametrize("name", ["", "..", "a/b", "a b", "-a", "x" * 129, "a\n", "а", "a\0"])
def test_unusable_name_is_refused(resident: Any, private_directory: Path, name: str) -> None:
    async def scenario() -> None:
        async with frontend(resident, private_directory) as front:
            answer = await front.http.post("/kt/adapters", json={"name": name, "path": str(private_directory)})
            assert answer.status_code == 400 and "adapter name" in answer.json()["error"]["message"]
            assert not resident.requests

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b'{"name": "a"}',
        b'{"name": "a", "path": 7}',
        b'{"name": "a", "path": "/", "pinned": true}',
        b"[" * 100_000,
        b"\xff\xfe",
        b'{"name": "' + b"x" * 70_000 + b'"}',
        b"\x80\x04\x95K\x00.",
    ],
    ids=lambda body: repr(body[:12]),
)
def test_malformed_body_is_refused(resident: Any, private_directory: Path, body: bytes) -> None:
    async def scenario() -> None:
        async with frontend(resident, private_directory) as front:
            answer = await front.http.post("/kt/adapters", content=body)
            assert answer.status_code == 400 and "body" in answer.json()["error"]["message"]
            assert not resident.requests

    asyncio.run(scenario())


def test_resident_that_does_not_answer_is_503(
    resident: Any, private_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters_module, "STATUS_SECONDS", 0.2)
    resident.is_silent = True

    async def scenario() -> None:
        async with frontend(resident, private_directory) as front:
            answer = await front.http.get("/kt/status")
            assert answer.status_code == 503 and answer.json()["error"]["kind"] == "RequestTimeoutError"
            resident.is_silent = False
            assert (await front.http.get("/kt/status")).status_code == 200

    asyncio.run(scenario())


def test_resident_that_is_gone_is_503_before_any_timeout(resident: Any, private_directory: Path) -> None:
    async def scenario() -> None:
        async with frontend(resident, private_directory) as front:
            resident.close()
            answer = await front.http.get("/kt/adapters")
            assert answer.status_code == 503 and answer.json()["error"]["kind"] == "ServerUnreachableError"

    asyncio.run(scenario())


def test_busy_resident_is_asked_again_under_the_same_id(private_directory: Path) -> None:
    address, seen = f"ipc://{private_directory}/busy.sock", []

    async def busy_twice(router: Any) -> None:
        while True:
            identity, *frames = await router.recv_multipart()
            seen.append(codec.decode_request(frames)[0].request_id)
            busy = error_reply(seen[-1], ServerBusyError("256 requests wait already"))
            reply = busy if len(seen) < 3 or seen[-1] == "s" else replies.DoneReply(request_id=seen[-1])
            await router.send_multipart([identity, *codec.encode(reply)])

    async def scenario() -> None:
        with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as router:
            router.bind(address)
            task = asyncio.create_task(busy_twice(router))
            calls = AsyncResidentClient(address)
            await calls.call(m.DropAdapter(request_id="r", lora_id="x"), replies.DoneReply, 60.0)
            assert seen == ["r"] * 3
            seen.clear()
            with pytest.raises(ServerBusyError, match="256 requests"):
                for _ in range(600):
                    with contextlib.suppress(RequestTimeoutError):  # on a busy machine no answer may come in time
                        await calls.call(m.DropAdapter(request_id="s", lora_id="x"), replies.DoneReply, 0.1)
            calls.close()
            task.cancel()

    asyncio.run(scenario())


def test_unloading_continues_although_the_resident_no_longer_knows_the_name(
    resident: Any, private_directory: Path
) -> None:
    async def scenario() -> None:
        async with frontend(resident, private_directory) as front:
            await front.adapters.load("a", str(private_directory))
            resident.adapters.clear()
            assert (await front.adapters.unload("a"))["name"] == "a" and front.registry.names() == {}

    asyncio.run(scenario())


def test_settings_are_shown_and_changed_and_a_bad_one_changes_nothing(resident: Any, private_directory: Path) -> None:
    async def scenario() -> None:
        async with frontend(resident, private_directory) as front:
            stated = (await front.http.get("/kt/settings")).json()
            assert stated == {
                "tpot_target_ms": None,
                "ttft_target_ms": None,
                "train_share": 0.5,
                "schedule": "slices",
                "weights": {},
            }
            changes = {"tpot_target_ms": 40, "weights": {"s": 2}}
            answer = await front.http.patch("/kt/settings", json=changes)
            assert answer.json() == stated | {"tpot_target_ms": 40.0, "weights": {"s": 2.0}}
            for body, status, message in [
                ({"tpot_target": 1}, 404, "tpot_target_ms"),
                ({"train_share": 0}, 400, "train_share 0"),
                ([1], 400, "body"),
            ]:
                refused = await front.http.patch("/kt/settings", json=body)
                assert refused.status_code == status and message in refused.json()["error"]["message"]
            assert (await front.http.get("/kt/settings")).json() == answer.json()

    asyncio.run(scenario())


class Watcher:
    def __init__(self) -> None:
        self.told: list[tuple[str, str | None]] = []

    def moved(self, name: str, version: str) -> None:
        self.told.append((name, version))

    def removed(self, name: str) -> None:
        self.told.append((name, None))


def test_the_registry_is_shown_if_there_is_one(resident: Any, private_directory: Path) -> None:
    async def scenario() -> None:
        async with frontend(resident, private_directory) as front:
            refused = await front.http.get("/kt/registry")
            assert refused.status_code == 409 and "--registry DIR|URL" in refused.json()["error"]["message"]
            assert (await front.http.get("/kt/status")).json()["registry"] is None
            front.adapters.registry = lambda: {"place": "/srv/registry", "names": []}
            assert (await front.http.get("/kt/registry")).json() == {"place": "/srv/registry", "names": []}
            assert (await front.http.get("/kt/status")).json()["registry"]["place"] == "/srv/registry"

    asyncio.run(scenario())


def test_a_watcher_is_told_of_every_name_that_moves_or_goes(resident: Any, private_directory: Path) -> None:
    async def scenario() -> None:
        async with frontend(resident, private_directory) as front:
            watcher = front.adapters._names.watcher = Watcher()
            body = {"name": "a", "path": str(private_directory)}
            version = (await front.http.post("/kt/adapters", json=body)).json()["version"]
            other = (await front.adapters.follow("a", str(private_directory), "ab" * 32, "of two"))["version"]
            await front.http.delete("/kt/adapters/a")
            assert watcher.told == [("a", version), ("a", other), ("a", None)]
            (followed,) = resident.received(m.FollowAdapter)
            assert (followed.adapter_version, followed.source) == ("ab" * 32, "of two")

    asyncio.run(scenario())
