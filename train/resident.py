"""The trainer's interface to the resident: the part of `ResidentClient` that a run uses. Tests replace it.

Each method is the method of the same name in `kt_runtime.wire.ResidentClient`, with the same errors.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy.typing as npt

from kt_runtime.wire import Batch, ForwardResult, LoraSettings, Loss, Samples, Ticket
from kt_runtime.wire.messages import Activations, Model, RoutingReplay
from kt_runtime.wire.replies import OptimReply, PublishReply, SavedReply, StatusReply
from kt_runtime.wire.status import SessionInfo


class Resident(Protocol):
    def status(self) -> StatusReply: ...

    def create_session(
        self,
        session: str,
        lora: LoraSettings,
        start_from: str | None = None,
        *,
        reference: str | None = None,
        publishes: str | None = None,
        take_over: bool = False,
    ) -> SessionInfo: ...

    def begin_forward(
        self,
        session: str,
        batch: Batch,
        loss: Loss | None = None,
        *,
        model: Model = "policy",
        reference: npt.ArrayLike | None = None,
    ) -> Ticket: ...

    def begin_forward_backward(
        self,
        session: str,
        batch: Batch,
        loss: Loss | None = None,
        *,
        reference: npt.ArrayLike | None = None,
        samples: Samples | None = None,
        activations: Activations = "recompute",
        routing_replay: RoutingReplay = "off",
        rollout_version: str | None = None,
    ) -> Ticket: ...

    def finish_forward(self, ticket: Ticket, batch: Batch) -> ForwardResult: ...

    def optim_step(self, session: str, learning_rate: float, **settings: Any) -> OptimReply: ...

    def save(self, session: str, path: str, *, optimizer: bool = True, replace: bool = False) -> SavedReply: ...

    def load(self, session: str, path: str) -> SessionInfo: ...

    def publish(self, session: str, name: str, *, take_over: bool = False) -> PublishReply: ...

    def close_session(self, session: str) -> None: ...
