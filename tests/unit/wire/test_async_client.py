from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kt_runtime.errors import ConflictError, ProtocolError, RequestTimeoutError, ServerUnreachableError
from kt_runtime.wire import WireServer, messages, replies
from kt_runtime.wire.async_client import AsyncResidentClient


def call(
    address: str,
    *requests: messages.AnyRequest,
    reply_type: Any = replies.DoneReply,
    timeout_s: float = 20.0,
    **options: Any,
) -> list[Any]:
    """The replies to requests that are in flight together."""

    async def all_of_them() -> list[Any]:
        client = AsyncResidentClient(address, **options)
        try:
            return await asyncio.gather(*(client.call(request, reply_type, timeout_s) for request in requests))
        finally:
            client.close()

    return asyncio.run(all_of_them())


def drop(request_id: str) -> messages.DropAdapter:
    return messages.DropAdapter(request_id=request_id, lora_id=request_id)


def test_calls_in_flight_together_get_their_own_replies(resident: Any, server: WireServer) -> None:
    ids = [f"r{number}" for number in range(20)]
    assert [reply.request_id for reply in call(server.address, *map(drop, ids))] == ids
    assert sorted(request.request_id for request in resident.executed) == sorted(ids)


def test_a_resent_request_is_executed_once(
    server: WireServer, make_resident: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[bytes] = []
    admit = server._admit
    resident: list[Any] = []

    def counted(identity: bytes, frames: list[bytes]) -> None:
        sent.append(identity)
        admit(identity, frames)
        if len(sent) == 3:  # the resident begins to answer after the second retry
            resident.append(make_resident(on=server))

    monkeypatch.setattr(server, "_admit", counted)
    assert call(server.address, drop("a"), resend_s=0.02) == [replies.DoneReply(request_id="a")]
    assert len(sent) >= 3 and [request.request_id for request in resident[0].executed] == ["a"]


def test_errors_are_those_of_the_blocking_client(
    address: str, make_server: Callable[..., WireServer], make_resident: Callable[..., Any]
) -> None:
    with pytest.raises(ServerUnreachableError, match=address):
        call(address, drop("a"))
    server = make_server()
    with pytest.raises(RequestTimeoutError, match=r"DropAdapter \(b\) within 0.05 s; it may still be executed"):
        call(address, drop("b"), timeout_s=0.05)
    with pytest.raises(ProtocolError, match=r"DropAdapter: .*lora_id"):
        call(address, messages.DropAdapter(request_id="c", lora_id="x" * 200))
    make_resident({"ForgetAdapter": ConflictError("adapter 'a' moves")}, on=server)
    with pytest.raises(ConflictError, match="adapter 'a' moves"):
        call(address, messages.ForgetAdapter(request_id="d", name="a"))
    with pytest.raises(ProtocolError, match="DoneReply, not PublishReply"):
        call(address, drop("e"), reply_type=replies.PublishReply)


def test_arrays_go_out_with_a_request_and_come_back_with_its_reply(resident: Any, server: WireServer) -> None:
    arrays = {
        "tokens": np.array([1, 2], np.int32),
        "targets": np.array([2, 3], np.int32),
        "weights": np.array([0, 1], np.float32),
    }

    async def exchanged() -> Any:
        client = AsyncResidentClient(server.address)
        try:
            request = messages.Forward(request_id="r", session="s", lengths=[2])
            return await client.exchange(request, replies.ForwardReply, 20.0, arrays)
        finally:
            client.close()

    reply, received = asyncio.run(exchanged())
    assert reply.loss == 3.0 and received["logprobs"].tolist() == [-2, -3]
