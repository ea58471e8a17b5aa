"""Both ends of the names channel over real ZMQ, with SGLang's registry as we subclass it."""

from __future__ import annotations

import asyncio
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from kt_runtime.errors import ConflictError, RequestTimeoutError, ServerUnreachableError, UnknownNameError
from kt_runtime.serve.http import names
from kt_runtime.serve.http.names import NamesServer
from kt_runtime.sglang_patch.frontend.registry import VersionedRegistry
from kt_runtime.wire import codec
from kt_runtime.wire.messages import PROTOCOL_VERSION, GetStatus, MoveName
from kt_runtime.wire.names import NamesChannel
from kt_runtime.wire.replies import DoneReply, ErrorReply


class Dropped:
    """Stands in for the resident's DropAdapter: records, or fails as told."""

    def __init__(self, *errors: Exception) -> None:
        self.ids: list[str] = []
        self.errors = list(errors)

    async def __call__(self, lora_id: str) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.ids.append(lora_id)


def move(name: str, lora_id: str, in_s: float = 30.0, request_id: str = "m") -> MoveName:
    return MoveName(
        request_id=request_id,
        name=name,
        adapter_version="ab" * 32,
        lora_id=lora_id,
        expires_at=time.monotonic() + in_s,
    )


@pytest.fixture
def address(private_directory: Path) -> str:
    return f"ipc://{private_directory}/names.sock"


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_moves_sent_before_the_frontend_listens_arrive_in_order(address: str) -> None:
    channel, registry = NamesChannel(address), VersionedRegistry()
    ended: list[Any] = []
    for lora_id in ("id-1", "id-2"):
        channel.send("a", "v", lora_id, ended.append)
    channel.poll()
    assert not ended

    async def serve() -> None:
        async with NamesServer(address, registry, Dropped()):
            assert stat.S_IMODE(Path(address.removeprefix("ipc://")).stat().st_mode) == 0o600
            while len(ended) < 2:
                channel.poll()
                await asyncio.sleep(0.005)

    asyncio.run(asyncio.wait_for(serve(), 60))
    channel.close()
    assert ended == [None, None] and registry.names() == {"a": "id-2"}
    assert not Path(address.removeprefix("ipc://")).exists()


def test_requests_stay_on_the_copy_they_began_with_and_it_is_dropped_after_the_last(address: str) -> None:
    async def scenario() -> None:
        registry, dropped = VersionedRegistry(), Dropped()
        async with NamesServer(address, registry, dropped) as server:
            server.move(move("a", "id-1"))
            first, batch = await registry.acquire("a"), await registry.acquire(["a", None, "a"])
            server.move(move("a", "id-2"))
            assert first == "id-1" and batch == ["id-1", None, "id-1"] and await registry.acquire("a") == "id-2"
            await settle()
            assert server.draining == {"id-1": 3} and not dropped.ids
            await registry.release(batch)
            await settle()
            assert not dropped.ids
            await registry.release("id-1")
            await settle()
            assert dropped.ids == ["id-1"] and not server.draining and registry.num_in_flight("id-2") == 1

    asyncio.run(scenario())


def test_no_request_ever_finds_the_name_unknown_while_it_moves(address: str) -> None:
    async def scenario() -> None:
        registry, dropped = VersionedRegistry(), Dropped()
        registry.move("a", "id-0")
        num_requests, seen = 0, set()

        async def stream() -> None:
            nonlocal num_requests
            while num_requests < 3000:
                num_requests += 1
                lora_id = await registry.acquire("a")
                assert lora_id not in dropped.ids, "a request got a copy that was dropped"
                seen.add(lora_id)
                await asyncio.sleep(0)
                assert lora_id not in dropped.ids, "a copy was dropped under a request"
                await registry.release(lora_id)

        async with NamesServer(address, registry, dropped) as server:
            streams = [asyncio.create_task(stream()) for _ in range(16)]
            for number in range(1, 100):
                server.move(move("a", f"id-{number}"))
                await asyncio.sleep(0)
            await asyncio.gather(*streams)
            await settle()
            assert dropped.ids == [f"id-{number}" for number in range(99)] and len(seen) > 50

    asyncio.run(scenario())


def test_failed_requests_leave_the_counts_as_they_were() -> None:
    async def scenario() -> None:
        registry = VersionedRegistry()
        registry.move("a", "id-1")
        with pytest.raises(ValueError, match=r"unknown adapter 'b'; served are: a"):
            await registry.acquire(["a", "b"])
        await registry.release(None)
        await registry.release(["never-acquired", None])
        assert registry.num_in_flight("id-1") == 0

    asyncio.run(scenario())


def test_pinned_copy_keeps_its_meaning_until_it_is_unpinned(address: str) -> None:
    async def scenario() -> None:
        registry, dropped = VersionedRegistry(), Dropped()
        async with NamesServer(address, registry, dropped) as server:
            server.move(move("a", "id-1"))
            assert registry.pin("mine:1", "a") == "id-1"
            assert registry.pin("mine:2", "mine:1") == "id-1"
            server.move(move("a", "id-2"))
            await settle()
            assert await registry.acquire(["a", "mine:1"]) == ["id-2", "id-1"]
            assert registry.names() == {"a": "id-2"} and not dropped.ids
            await registry.release(["id-2", "id-1"])
            registry.unpin("mine:1")
            registry.unpin("mine:1")
            await settle()
            assert not dropped.ids
            registry.unpin("mine:2")
            await settle()
            assert dropped.ids == ["id-1"]
            with pytest.raises(ValueError, match="unknown adapter"):
                registry.pin("mine:3", "mine:1")

    asyncio.run(scenario())


def test_removed_name_is_unknown_at_once_and_its_copy_dropped_when_unused(address: str) -> None:
    async def scenario() -> None:
        registry, dropped = VersionedRegistry(), Dropped()
        async with NamesServer(address, registry, dropped) as server:
            server.move(move("a", "id-1"))
            await registry.acquire("a")
            assert server.remove("a") == "id-1" and server.remove("a") is None
            with pytest.raises(ValueError, match="unknown adapter"):
                await registry.acquire("a")
            await settle()
            assert not dropped.ids
            await registry.release("id-1")
            await settle()
            assert dropped.ids == ["id-1"]

    asyncio.run(scenario())


def test_copy_that_a_name_came_back_to_is_kept(address: str) -> None:
    async def scenario() -> None:
        registry, dropped = VersionedRegistry(), Dropped()
        async with NamesServer(address, registry, dropped) as server:
            server.move(move("a", "id-1"))
            await registry.acquire("a")
            server.move(move("a", "id-2"))
            server.move(move("a", "id-1"))
            await registry.release("id-1")
            await settle()
            assert dropped.ids == ["id-2"] and registry.names() == {"a": "id-1"}

    asyncio.run(scenario())


def test_drop_is_tried_again_while_the_resident_does_not_answer(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "FIRST_RETRY_SECONDS", 0.01)

    async def scenario(dropped: Dropped) -> list[str]:
        registry = VersionedRegistry()
        async with NamesServer(address, registry, dropped) as server:
            server.move(move("a", "id-1"))
            server.move(move("a", "id-2"))
            async with asyncio.timeout(60):
                while server.draining:
                    await asyncio.sleep(0.005)
        return dropped.ids

    assert asyncio.run(scenario(Dropped(ServerUnreachableError("gone"), RequestTimeoutError("slow")))) == ["id-1"]
    assert asyncio.run(scenario(Dropped(UnknownNameError("lora_id", "id-1", [])))) == []


def test_late_move_is_refused_and_changes_nothing(address: str) -> None:
    async def scenario() -> None:
        registry = VersionedRegistry()
        async with NamesServer(address, registry, Dropped()) as server:
            server.move(move("a", "id-1"))
            with pytest.raises(ConflictError, match="stopped waiting"):
                server.move(move("a", "id-2", in_s=-1.0))
            assert registry.names() == {"a": "id-1"}

    asyncio.run(scenario())


def test_resident_gives_up_after_its_timeout_and_a_late_answer_is_ignored(address: str) -> None:
    ended: list[Exception | None] = []
    channel = NamesChannel(address, timeout_s=0.05, grace_s=0.05)
    channel.send("a", "v", "id-1", ended.append)
    deadline = time.monotonic() + 60
    while not ended and time.monotonic() < deadline:
        channel.poll()
        time.sleep(0.01)
    assert isinstance(ended[0], RequestTimeoutError)

    async def serve() -> VersionedRegistry:
        registry = VersionedRegistry()
        async with NamesServer(address, registry, Dropped()):
            await asyncio.sleep(0.3)  # the move of before arrives now
        return registry

    assert asyncio.run(serve()).names() == {}
    channel.poll()
    channel.close()
    assert len(ended) == 1


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"\x80\x04\x95K\x00."],
        [b"\xff" * 100],
        [msgspec.msgpack.encode({"type": "move_name"})],
        [b"a", b"b"],
        [b"", b"", b""],
        [codec.MAGIC, msgspec.msgpack.encode({"type": "move_name", "version": PROTOCOL_VERSION}), b"\x90"],
        [codec.MAGIC, b"\xc1" * 70_000, b"\x90"],
        codec.encode(GetStatus(request_id="")),
    ],
)
def test_a_message_that_is_no_move_gets_an_error_and_the_next_move_succeeds(address: str, frames: list[bytes]) -> None:
    async def scenario() -> None:
        registry = VersionedRegistry()
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as peer:
            peer.setsockopt(zmq.LINGER, 0)
            async with NamesServer(address, registry, Dropped()):
                peer.connect(address)
                await peer.send_multipart(frames)
                refused, _ = codec.decode_reply(await peer.recv_multipart())
                assert isinstance(refused, ErrorReply) and refused.kind == "ProtocolError" and not refused.request_id
                await peer.send_multipart(codec.encode(move("a", "id-1")))
                answer, _ = codec.decode_reply(await peer.recv_multipart())
                assert answer == DoneReply(request_id="m") and registry.names() == {"a": "id-1"}

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_move_that_is_sent_twice_is_executed_once(address: str) -> None:
    async def scenario() -> None:
        registry = VersionedRegistry()
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as peer:
            peer.setsockopt(zmq.LINGER, 0)
            async with NamesServer(address, registry, Dropped()) as server:
                peer.connect(address)
                frames = codec.encode(move("a", "id-1"))
                await peer.send_multipart(frames)
                first = await peer.recv_multipart()
                server.move(move("a", "id-2"))
                await peer.send_multipart(frames)
                assert await peer.recv_multipart() == first
                assert registry.names() == {"a": "id-2"}

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_server_that_ends_answers_the_moves_that_it_has_not_executed(address: str) -> None:
    ended: list[Exception | None] = []
    channel, registry = NamesChannel(address), VersionedRegistry()

    async def scenario() -> None:
        async with NamesServer(address, registry, Dropped()) as server:
            asyncio.get_running_loop().remove_reader(server._wire.wakeup_fd)
            channel.send("a", "v", "id-1", ended.append)
            assert await asyncio.to_thread(server._wire.wait, 60.0)

    asyncio.run(asyncio.wait_for(scenario(), 60))
    deadline = time.monotonic() + 60
    while not ended and time.monotonic() < deadline:
        channel.poll()
        time.sleep(0.01)
    channel.close()
    assert isinstance(ended[0], ServerUnreachableError) and registry.names() == {}


def test_error_of_the_frontend_reaches_the_resident(address: str) -> None:
    ended: list[Exception | None] = []
    channel = NamesChannel(address)

    async def serve(poll: Callable[[], Any]) -> None:
        async with NamesServer(address, VersionedRegistry(), Dropped()) as server:
            server._dropping.add("id-1")
            channel.send("a", "v", "id-1", ended.append)
            while not ended:
                poll()
                await asyncio.sleep(0.005)

    asyncio.run(asyncio.wait_for(serve(channel.poll), 60))
    channel.close()
    assert isinstance(ended[0], ConflictError) and "is being dropped" in str(ended[0])


def test_a_move_from_another_thread_wakes_the_frontend(address: str) -> None:
    """Nothing else does here: a move that went unnoticed would never end."""
    ended: list[Any] = []

    def resident() -> None:
        channel = NamesChannel(address)
        for number in range(20):
            channel.send("a", "v", f"id-{number}", ended.append)
            while len(ended) <= number:
                channel.poll()
                time.sleep(0.0002)
        channel.close()

    async def serve() -> None:
        async with NamesServer(address, VersionedRegistry(), Dropped()):
            await asyncio.to_thread(resident)

    asyncio.run(asyncio.wait_for(serve(), 60))
    assert ended == [None] * 20


def test_name_that_means_the_model_is_refused_to_an_adapter(address: str) -> None:
    registry = VersionedRegistry()

    async def run() -> None:
        async with NamesServer(address, registry, Dropped(), reserved={"base"}) as server:
            with pytest.raises(ConflictError, match=r"'base'.*mean the model"):
                server.move(move("base", "id-1"))
            server.move(move("base2", "id-1"))

    asyncio.run(run())
    assert registry.names() == {"base2": "id-1"}
