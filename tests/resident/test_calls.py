"""The order of a session's requests, with an inbox in the wire server's place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kt_runtime.resident.service import Resident
from kt_runtime.resident.settings import ResidentSettings
from kt_runtime.wire.messages import (
    CloseSession,
    CreateSession,
    Forward,
    ForwardBackward,
    LoraSettings,
    OptimStep,
    Publish,
)
from kt_runtime.wire.server import Incoming


class Inbox:
    """In the place of a WireServer: requests that arrived together, and the answers in their order."""

    wakeup_fd = -1

    def __init__(self, requests: list[tuple[Any, dict[str, np.ndarray]]]) -> None:
        self._waiting = [Incoming(request, arrays, b"", request.request_id) for request, arrays in requests]
        self.replies: list[Any] = []

    @property
    def has_pending(self) -> bool:
        return bool(self._waiting)

    def take(self) -> list[Incoming]:
        taken, self._waiting = self._waiting, []
        return taken

    def answer(self, incoming: Incoming, reply: Any, arrays: Any = None) -> None:
        self.replies.append(reply)

    def close(self) -> None:
        pass


def test_requests_of_a_session_that_arrive_together_keep_their_order(
    make_host: Callable[..., Any], make_batch: Any, tmp_path: Path
) -> None:
    batch = make_batch(20, 9)
    arrays = {"tokens": batch.tokens, "targets": batch.targets, "weights": batch.weights}
    call = {"session": "a", "lengths": batch.lengths}
    inbox = Inbox(
        [
            (CreateSession(request_id="0", session="a", lora=LoraSettings(rank=4, alpha=8.0)), {}),
            (ForwardBackward(request_id="1", **call), arrays),
            (ForwardBackward(request_id="2", **call), arrays),
            (OptimStep(request_id="3", session="a", learning_rate=1e-2), {}),
            (Forward(request_id="4", **call), arrays),
            (Publish(request_id="5", session="a", name="bob"), {}),
            (CloseSession(request_id="6", session="a"), {}),
            (Forward(request_id="7", **call), arrays),
        ]
    )
    settings = ResidentSettings(
        model="", model_directory="", wire_address="", names_address="", adapter_directory=str(tmp_path)
    )
    resident = Resident(make_host(), settings, inbox)
    while len(inbox.replies) < 8:
        resident.apply(resident.decisions())
        resident.turn()
    resident.close()
    replies = {reply.request_id: reply for reply in inbox.replies}
    assert replies["1"].loss == replies["2"].loss > replies["4"].loss
    assert replies["3"].step == 1
    assert replies["5"].name == "bob"
    assert replies["7"].kind == "UnknownNameError"
