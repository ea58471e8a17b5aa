"""One run's requests to the resident: the adapter in training behind a model of the Tinker API."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from kt_runtime.errors import InvalidValueError, ProtocolError
from kt_runtime.serve.tinker.checkpoints import RunRecord
from kt_runtime.serve.tinker.protocol.batches import TrainingCall
from kt_runtime.serve.tinker.protocol.bodies import AdamParams, OptimStep, decoded
from kt_runtime.serve.tinker.protocol.results import ForwardResult, JsonResult, metrics_of
from kt_runtime.wire import messages, replies
from kt_runtime.wire.async_client import AsyncResident
from kt_runtime.wire.messages import AnyRequest, LoraSettings
from kt_runtime.wire.replies import Reply

CALL_SECONDS = 24 * 3600.0
"""A call may wait for other sessions' work; the resident ends it with an error if it can't be done."""
SMALL_BYTES = 64 * 1024
"""Larger calls are read on a thread: the event loop serves other clients."""

_R = TypeVar("_R", bound=Reply)


def new_id() -> str:
    return f"tinker-{secrets.token_hex(8)}"


class Training:
    """`session`: the name of the session in the resident. Every method raises the resident's errors."""

    def __init__(self, resident: AsyncResident, session: str, context_tokens: int) -> None:
        self._resident, self.session, self._context_tokens = resident, session, context_tokens

    async def open(self, run: RunRecord, start_from: Path | None = None) -> None:
        lora = LoraSettings(rank=run.rank, alpha=run.alpha, targets=run.targets, seed=run.seed)
        await self._call(
            messages.CreateSession(
                request_id=new_id(),
                session=self.session,
                lora=lora,
                start_from=None if start_from is None else str(start_from),
            ),
            replies.SessionReply,
        )

    async def restore(self, path: Path) -> None:
        """Masters and optimizer state."""
        await self._call(messages.Load(request_id=new_id(), session=self.session, path=str(path)), replies.SessionReply)

    async def forward(self, call: TrainingCall) -> ForwardResult:
        if call.num_bytes > SMALL_BYTES:
            training = await asyncio.to_thread(call.read, self._context_tokens)
        else:
            training = call.read(self._context_tokens)
        fields: dict[str, Any] = {
            "session": self.session,
            "lengths": training.batch.lengths,
            "loss": training.loss,
            "routing_replay": training.routing_replay,
        }
        request: AnyRequest
        if call.forward_only:
            request = messages.Forward(request_id=new_id(), **fields)
        else:
            request = messages.ForwardBackward(request_id=new_id(), **fields)
        reply, arrays = await self._resident.exchange(request, replies.ForwardReply, CALL_SECONDS, training.arrays)
        if len(arrays["logprobs"]) != training.batch.num_tokens:
            raise ProtocolError(f"{len(arrays['logprobs'])} log-probabilities for {training.batch.num_tokens} targets")
        metrics = metrics_of(reply, training.loss)
        metrics["counted:sum"] = float(np.count_nonzero(training.batch.weights))
        return ForwardResult(training.batch.split(arrays["logprobs"]), metrics)

    async def optim_step(self, body: OptimStep) -> JsonResult:
        if body.optimizer_params is not None:
            raise InvalidValueError(f"optimizer {body.optimizer_params.get('type')!r}: this server has adamw only")
        params = decoded(bytes(body.adam_params), AdamParams)
        request = messages.OptimStep(
            request_id=new_id(),
            session=self.session,
            learning_rate=params.learning_rate,
            beta1=params.beta1,
            beta2=params.beta2,
            epsilon=params.eps,
            weight_decay=params.weight_decay,
            max_grad_norm=params.grad_clip_norm,
        )
        reply = await self._call(request, replies.OptimReply)
        return JsonResult({"metrics": {"grad_norm:mean": reply.grad_norm, "step:max": float(reply.step)}})

    async def save(self, path: Path, *, replace: bool) -> replies.SavedReply:
        request = messages.Save(request_id=new_id(), session=self.session, path=str(path), replace=replace)
        return await self._call(request, replies.SavedReply)

    async def publish(self, name: str) -> replies.PublishReply:
        request = messages.Publish(request_id=new_id(), session=self.session, name=msgspec.convert(name, messages.Name))
        return await self._call(request, replies.PublishReply)

    async def close(self) -> None:
        await self._call(messages.CloseSession(request_id=new_id(), session=self.session), replies.DoneReply)

    async def _call(self, request: AnyRequest, reply_type: type[_R]) -> _R:
        return await self._resident.call(request, reply_type, CALL_SECONDS)
