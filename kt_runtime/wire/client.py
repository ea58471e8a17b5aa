"""The trainer's end of the wire: one method per message. The client retries a request under the same id until answered.

`FollowAdapter`, `ForgetAdapter` and `DropAdapter` have no method: they are the frontend's. Not thread-safe: a client
belongs to one thread. The server runs a retried request only once (`answers.py`). A call that raised
RequestTimeoutError may still run later, once.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import zmq

from kt_runtime.errors import ProtocolError
from kt_runtime.wire import messages, replies
from kt_runtime.wire.address import probe
from kt_runtime.wire.batch import Batch, Samples
from kt_runtime.wire.codec import Arrays, Limits
from kt_runtime.wire.failures import error_from
from kt_runtime.wire.messages import Activations, AnyRequest, CrossEntropy, LoraSettings, Loss, Model, RoutingReplay
from kt_runtime.wire.replies import AnyReply, ErrorReply
from kt_runtime.wire.settings import Settings
from kt_runtime.wire.status import SessionInfo
from kt_runtime.wire.ticket import FIRST_RESEND_SECONDS, Ticket, checked_type, deliver, open_dealer

# The effects of these requests commute, so several may be in flight. Any other request waits for all before it.
COMMUTING = (messages.GetStatus, messages.Forward, messages.ForwardBackward)

_R = TypeVar("_R", bound=replies.Reply)


@dataclass(frozen=True)
class ForwardResult:
    """`logprobs`: of each target, one float32 array per sequence. The other fields are those of `ForwardReply`."""

    loss: float
    logprobs: list[npt.NDArray[np.float32]]
    num_tokens: int
    seconds: float
    metrics: dict[str, float]
    num_correct: int
    num_computed: int


class ResidentClient:
    """A connection to the resident at `address`.

    Raises ServerUnreachableError if nothing listens there, on construction or while waiting; RequestTimeoutError if an
    answer takes longer than `timeout_s`; and any error of `kt_runtime.errors` that the resident replies with.
    `client_id` is the prefix of every request id; never use one id twice for different work. `resend_s`: seconds before
    the first retry.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float = 600.0,
        client_id: str | None = None,
        resend_s: float = FIRST_RESEND_SECONDS,
        max_message_bytes: int = Limits.max_message_bytes,
    ) -> None:
        probe(address)
        self.address, self.timeout_s = address, timeout_s
        self.client_id = client_id or secrets.token_hex(8)
        self._resend_s, self._limits = resend_s, Limits(max_message_bytes=max_message_bytes)
        self._num_requests = 0
        self._tickets: dict[str, Ticket] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = open_dealer(self._context, address, self._limits)

    def close(self) -> None:
        self._context.destroy(linger=0)

    def __enter__(self) -> ResidentClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # One method per message.

    def status(self, *, verify_weights: bool = False, wait_s: float | None = None) -> replies.StatusReply:
        """`wait_s`: how long to wait for the weights' hash, as in `messages.GetStatus`."""
        request = messages.GetStatus(request_id=self._next_id(), verify_weights=verify_weights, wait_s=wait_s)
        return self._call(request, replies.StatusReply)

    def change_settings(self, **changes: Any) -> Settings:
        """The settings after the changes, as `wire.settings.changed` makes them; without changes the present ones."""
        request = messages.ChangeSettings(request_id=self._next_id(), changes=changes)
        return self._call(request, replies.SettingsReply).settings

    def create_session(
        self,
        session: str,
        lora: LoraSettings,
        start_from: str | None = None,
        *,
        reference: str | None = None,
        publishes: str | None = None,
        take_over: bool = False,
    ) -> SessionInfo:
        """`start_from` and `reference` are PEFT directories on the resident's file system."""
        request = messages.CreateSession(
            request_id=self._next_id(),
            session=session,
            lora=lora,
            start_from=start_from,
            reference=reference,
            publishes=publishes,
            take_over=take_over,
        )
        return self._call(request, replies.SessionReply).info

    def forward(
        self,
        session: str,
        batch: Batch,
        loss: Loss | None = None,
        *,
        model: Model = "policy",
        reference: npt.ArrayLike | None = None,
        samples: Samples | None = None,
        routing_replay: RoutingReplay = "off",
        rollout_version: str | None = None,
    ) -> ForwardResult:
        """`reference` [number of sequences]: required for model "policy" by a `PreferenceLoss` that `has_reference`.

        `samples`: required by a `PolicyLoss`. `routing_replay`, `rollout_version`: as in `messages.Forward`.
        """
        ticket = self.begin_forward(
            session,
            batch,
            loss,
            model=model,
            reference=reference,
            samples=samples,
            routing_replay=routing_replay,
            rollout_version=rollout_version,
        )
        return self._forward_result(ticket, batch)

    def begin_forward(
        self,
        session: str,
        batch: Batch,
        loss: Loss | None = None,
        *,
        model: Model = "policy",
        reference: npt.ArrayLike | None = None,
        samples: Samples | None = None,
        routing_replay: RoutingReplay = "off",
        rollout_version: str | None = None,
    ) -> Ticket:
        """As `forward`, without waiting; `finish_forward(ticket, batch)` returns the result."""
        request = messages.Forward(
            request_id=self._next_id(),
            session=session,
            lengths=batch.lengths,
            loss=loss or CrossEntropy(),
            model=model,
            routing_replay=routing_replay,
            rollout_version=rollout_version,
        )
        return self.submit(request, _arrays(batch, reference, samples))

    def forward_backward(
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
    ) -> ForwardResult:
        ticket = self.begin_forward_backward(
            session,
            batch,
            loss,
            reference=reference,
            samples=samples,
            activations=activations,
            routing_replay=routing_replay,
            rollout_version=rollout_version,
        )
        return self._forward_result(ticket, batch)

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
    ) -> Ticket:
        """As `forward_backward`, without waiting; `finish_forward(ticket, batch)` returns the result."""
        request = messages.ForwardBackward(
            request_id=self._next_id(),
            session=session,
            lengths=batch.lengths,
            loss=loss or CrossEntropy(),
            activations=activations,
            routing_replay=routing_replay,
            rollout_version=rollout_version,
        )
        return self.submit(request, _arrays(batch, reference, samples))

    def finish_forward(self, ticket: Ticket, batch: Batch) -> ForwardResult:
        reply, arrays = self.wait(ticket)
        answer = checked_type(self.address, reply, replies.ForwardReply)
        if len(arrays["logprobs"]) != batch.num_tokens:
            raise ProtocolError(f"{self.address}: {len(arrays['logprobs'])} logprobs for {batch.num_tokens} targets")
        return ForwardResult(
            answer.loss,
            batch.split(arrays["logprobs"]),
            answer.num_tokens,
            answer.seconds,
            answer.metrics,
            answer.num_correct,
            answer.num_computed,
        )

    def optim_step(self, session: str, learning_rate: float, **settings: Any) -> replies.OptimReply:
        """`settings`: beta1, beta2, epsilon, weight_decay, max_grad_norm, lora_plus_ratio."""
        request = messages.OptimStep(
            request_id=self._next_id(), session=session, learning_rate=learning_rate, **settings
        )
        return self._call(request, replies.OptimReply)

    def save(self, session: str, path: str, *, optimizer: bool = True, replace: bool = False) -> replies.SavedReply:
        """`path` is on the resident's file system."""
        request = messages.Save(
            request_id=self._next_id(), session=session, path=str(path), optimizer=optimizer, replace=replace
        )
        return self._call(request, replies.SavedReply)

    def load(self, session: str, path: str) -> SessionInfo:
        request = messages.Load(request_id=self._next_id(), session=session, path=str(path))
        return self._call(request, replies.SessionReply).info

    def publish(self, session: str, name: str, *, take_over: bool = False) -> replies.PublishReply:
        request = messages.Publish(request_id=self._next_id(), session=session, name=name, take_over=take_over)
        return self._call(request, replies.PublishReply)

    def close_session(self, session: str) -> None:
        self._call(messages.CloseSession(request_id=self._next_id(), session=session), replies.DoneReply)

    def load_adapter(self, name: str, path: str, *, take_over: bool = False) -> replies.PublishReply:
        """`path` is on the resident's file system."""
        request = messages.LoadAdapter(request_id=self._next_id(), name=name, path=str(path), take_over=take_over)
        return self._call(request, replies.PublishReply)

    def rollback_adapter(self, name: str, adapter_version: str | None = None) -> replies.PublishReply:
        request = messages.RollbackAdapter(request_id=self._next_id(), name=name, adapter_version=adapter_version)
        return self._call(request, replies.PublishReply)

    def list_adapters(self) -> list[replies.AdapterInfo]:
        return self._call(messages.ListAdapters(request_id=self._next_id()), replies.AdaptersReply).adapters

    # Any request, without waiting.

    def submit(self, request: AnyRequest, arrays: Arrays | None = None) -> Ticket:
        """Sends `request` without waiting for its answer. If `request` does not commute with the requests in flight,
        first waits for those. Then, if an earlier request has failed and its ticket was not waited for yet, raises that
        error and sends nothing: no optimizer step may use half a gradient.

        Raises ProtocolError if the message is not valid.
        """
        ticket = Ticket.of(request, arrays, self._limits, self._resend_s)
        if not isinstance(request, COMMUTING) or not all(isinstance(t.request, COMMUTING) for t in self._in_flight()):
            self._settle()
        self._tickets[request.request_id] = ticket
        self._send(ticket)
        return ticket

    def wait(self, ticket: Ticket, timeout_s: float | None = None) -> tuple[AnyReply, dict[str, np.ndarray]]:
        """The reply and its arrays, once per ticket. After a RequestTimeoutError, `wait` may be called again."""
        self._turn_until(ticket, self.timeout_s if timeout_s is None else timeout_s)
        self._tickets.pop(ticket.request.request_id, None)
        return ticket.result()

    # Below: retries and receiving.

    def _next_id(self) -> str:
        self._num_requests += 1
        return f"{self.client_id}-{self._num_requests}"

    def _call(self, request: AnyRequest, reply_type: type[_R]) -> _R:
        ticket = self.submit(request)
        return checked_type(self.address, self._wait_or_abandon(ticket)[0], reply_type)

    def _forward_result(self, ticket: Ticket, batch: Batch) -> ForwardResult:
        try:
            return self.finish_forward(ticket, batch)
        except BaseException:
            ticket.abandoned = True
            raise

    def _wait_or_abandon(self, ticket: Ticket) -> tuple[AnyReply, dict[str, np.ndarray]]:
        try:
            return self.wait(ticket)
        except BaseException:
            ticket.abandoned = True
            raise

    def _in_flight(self) -> list[Ticket]:
        return [ticket for ticket in self._tickets.values() if ticket.reply is None]

    def _settle(self) -> None:
        for ticket in self._in_flight():
            self._turn_until(ticket, self.timeout_s)
        for ticket in list(self._tickets.values()):
            if isinstance(ticket.reply, ErrorReply):
                self._tickets.pop(ticket.request.request_id)
                raise error_from(ticket.reply)

    def _turn_until(self, ticket: Ticket, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while ticket.reply is None:
            now = time.monotonic()
            if now >= deadline:
                raise ticket.timeout(self.address, timeout_s)
            for other in self._in_flight():
                if other.next_send <= now:
                    probe(self.address)
                    self._send(other)
            wake = min([deadline, *(other.next_send for other in self._in_flight())])
            if self._socket.poll(int(max(0.0, wake - time.monotonic()) * 1000) + 1):
                self._receive()

    def _send(self, ticket: Ticket) -> None:
        with contextlib.suppress(zmq.Again):  # ZMQ's send queue is full; the next retry is scheduled below
            self._socket.send_multipart(ticket.frames, zmq.NOBLOCK)
        ticket.sent()

    def _receive(self) -> None:
        ticket = deliver(self._socket.recv_multipart(), self._tickets, self._limits)
        if ticket and ticket.abandoned and ticket.reply is not None and not isinstance(ticket.reply, ErrorReply):
            del self._tickets[ticket.request.request_id]


def _arrays(batch: Batch, reference: npt.ArrayLike | None, samples: Samples | None) -> dict[str, npt.NDArray[Any]]:
    arrays: dict[str, npt.NDArray[Any]] = {"tokens": batch.tokens, "targets": batch.targets, "weights": batch.weights}
    if reference is not None:
        arrays["reference"] = np.asarray(reference, np.float32)
    if samples is not None:
        arrays |= {"sampled": samples.logprobs, "advantages": samples.advantages}
    return arrays
