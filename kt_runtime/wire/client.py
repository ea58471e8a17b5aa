"""The trainer's end of the wire: one method per message. The client retries a request under the same id until answered.

Not thread-safe: a client belongs to one thread. The server runs a retried request only once (`answers.py`). A call that
raised RequestTimeoutError may still run later, once.
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

from kt_runtime.errors import InvalidValueError, KtError, ProtocolError, RequestTimeoutError, ServerBusyError
from kt_runtime.wire import codec, messages
from kt_runtime.wire.address import is_ipc, probe
from kt_runtime.wire.batch import Batch, Samples
from kt_runtime.wire.codec import Arrays, Limits
from kt_runtime.wire.failures import error_from
from kt_runtime.wire.keys import key_bytes
from kt_runtime.wire.messages import (
    Activations,
    AnyReply,
    AnyRequest,
    CrossEntropy,
    ErrorReply,
    LoraSettings,
    Loss,
    Model,
    SessionInfo,
)

FIRST_RESEND_SECONDS = 5.0
LAST_RESEND_SECONDS = 60.0
FIRST_BUSY_SECONDS = 0.1
LAST_BUSY_SECONDS = 5.0

# The effects of these requests commute, so several may be in flight. Any other request waits for all before it.
COMMUTING = (messages.GetStatus, messages.Forward, messages.ForwardBackward)

_R = TypeVar("_R", bound=messages.Reply)


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


@dataclass(eq=False)
class Ticket:
    """A request in flight; pass it to `ResidentClient.wait`."""

    request: AnyRequest
    frames: list[bytes]
    next_send: float
    resend_s: float
    busy_s: float = FIRST_BUSY_SECONDS
    reply: AnyReply | None = None
    arrays: dict[str, np.ndarray] | None = None
    refused_busy: ServerBusyError | None = None
    abandoned: bool = False


class ResidentClient:
    """A connection to the resident at `address`.

    Raises ServerUnreachableError if nothing listens there, on construction or while waiting; RequestTimeoutError if an
    answer takes longer than `timeout_s`; and any error of `kt_runtime.errors` that the resident replies with.
    `client_id` is the prefix of every request id; never use one id twice for different work. tcp:// needs all three
    CURVE keys. `resend_s`: seconds before the first retry.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float = 600.0,
        client_id: str | None = None,
        resend_s: float = FIRST_RESEND_SECONDS,
        max_message_bytes: int = Limits.max_message_bytes,
        server_public_key: str | None = None,
        client_public_key: str | None = None,
        client_secret_key: str | None = None,
    ) -> None:
        keys = {
            "server's public key": server_public_key,
            "client's public key": client_public_key,
            "client's secret key": client_secret_key,
        }
        _check_keys(address, keys)
        probe(address)
        self.address, self.timeout_s = address, timeout_s
        self.client_id = client_id or secrets.token_hex(8)
        self._resend_s, self._limits = resend_s, Limits(max_message_bytes=max_message_bytes)
        self._num_requests = 0
        self._tickets: dict[str, Ticket] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, 2 * max_message_bytes)
        if server_public_key and client_public_key and client_secret_key:
            self._socket.setsockopt_string(zmq.CURVE_SERVERKEY, server_public_key)
            self._socket.setsockopt_string(zmq.CURVE_PUBLICKEY, client_public_key)
            self._socket.setsockopt_string(zmq.CURVE_SECRETKEY, client_secret_key)
        self._socket.connect(address)

    def close(self) -> None:
        self._context.destroy(linger=0)

    def __enter__(self) -> ResidentClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # One method per message.

    def status(self, *, verify_weights: bool = False, wait_s: float | None = None) -> messages.StatusReply:
        """`wait_s`: how long to wait for the weights' hash, as in `messages.GetStatus`."""
        request = messages.GetStatus(request_id=self._next_id(), verify_weights=verify_weights, wait_s=wait_s)
        return self._call(request, messages.StatusReply)

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
        return self._call(request, messages.SessionReply).info

    def forward(
        self,
        session: str,
        batch: Batch,
        loss: Loss | None = None,
        *,
        model: Model = "policy",
        reference: npt.ArrayLike | None = None,
        samples: Samples | None = None,
    ) -> ForwardResult:
        """`reference` [number of sequences]: required for model "policy" by a `PreferenceLoss` that `has_reference`.

        `samples`: required by a `PolicyLoss`.
        """
        ticket = self.begin_forward(session, batch, loss, model=model, reference=reference, samples=samples)
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
    ) -> Ticket:
        """As `forward`, without waiting; `finish_forward(ticket, batch)` returns the result."""
        request = messages.Forward(
            request_id=self._next_id(),
            session=session,
            lengths=batch.lengths,
            loss=loss or CrossEntropy(),
            model=model,
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
    ) -> ForwardResult:
        ticket = self.begin_forward_backward(
            session, batch, loss, reference=reference, samples=samples, activations=activations
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
    ) -> Ticket:
        """As `forward_backward`, without waiting; `finish_forward(ticket, batch)` returns the result."""
        request = messages.ForwardBackward(
            request_id=self._next_id(),
            session=session,
            lengths=batch.lengths,
            loss=loss or CrossEntropy(),
            activations=activations,
        )
        return self.submit(request, _arrays(batch, reference, samples))

    def finish_forward(self, ticket: Ticket, batch: Batch) -> ForwardResult:
        reply, arrays = self.wait(ticket)
        answer = self._expect(reply, messages.ForwardReply)
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

    def optim_step(self, session: str, learning_rate: float, **settings: Any) -> messages.OptimReply:
        """`settings`: beta1, beta2, epsilon, weight_decay, max_grad_norm, lora_plus_ratio."""
        request = messages.OptimStep(
            request_id=self._next_id(), session=session, learning_rate=learning_rate, **settings
        )
        return self._call(request, messages.OptimReply)

    def save(self, session: str, path: str, *, optimizer: bool = True, replace: bool = False) -> messages.SavedReply:
        """`path` is on the resident's file system."""
        request = messages.Save(
            request_id=self._next_id(), session=session, path=str(path), optimizer=optimizer, replace=replace
        )
        return self._call(request, messages.SavedReply)

    def load(self, session: str, path: str) -> SessionInfo:
        request = messages.Load(request_id=self._next_id(), session=session, path=str(path))
        return self._call(request, messages.SessionReply).info

    def publish(self, session: str, name: str, *, take_over: bool = False) -> messages.PublishReply:
        request = messages.Publish(request_id=self._next_id(), session=session, name=name, take_over=take_over)
        return self._call(request, messages.PublishReply)

    def close_session(self, session: str) -> None:
        self._call(messages.CloseSession(request_id=self._next_id(), session=session), messages.DoneReply)

    def load_adapter(self, name: str, path: str, *, take_over: bool = False) -> messages.PublishReply:
        """`path` is on the resident's file system."""
        request = messages.LoadAdapter(request_id=self._next_id(), name=name, path=str(path), take_over=take_over)
        return self._call(request, messages.PublishReply)

    def rollback_adapter(self, name: str, adapter_version: str | None = None) -> messages.PublishReply:
        request = messages.RollbackAdapter(request_id=self._next_id(), name=name, adapter_version=adapter_version)
        return self._call(request, messages.PublishReply)

    def list_adapters(self) -> list[messages.AdapterInfo]:
        return self._call(messages.ListAdapters(request_id=self._next_id()), messages.AdaptersReply).adapters

    def forget_adapter(self, name: str) -> None:
        self._call(messages.ForgetAdapter(request_id=self._next_id(), name=name), messages.ForgottenReply)

    def drop_adapter(self, lora_id: str) -> None:
        self._call(messages.DropAdapter(request_id=self._next_id(), lora_id=lora_id), messages.DoneReply)

    # Any request, without waiting.

    def submit(self, request: AnyRequest, arrays: Arrays | None = None) -> Ticket:
        """Sends `request` without waiting for its answer. If `request` does not commute with the requests in flight,
        first waits for those. Then, if an earlier request has failed and its ticket was not waited for yet, raises that
        error and sends nothing: no optimizer step may use half a gradient.

        Raises ProtocolError if the message is not valid.
        """
        frames = codec.encode(request, arrays, self._limits)
        try:
            codec.decode_request(frames, self._limits)  # constraints are only checked on decoding
        except ProtocolError as error:
            raise ProtocolError(f"{type(request).__name__}: {error}") from None
        if not isinstance(request, COMMUTING) or not all(isinstance(t.request, COMMUTING) for t in self._under_way()):
            self._settle()
        ticket = Ticket(request, frames, time.monotonic(), self._resend_s)
        self._tickets[request.request_id] = ticket
        self._send(ticket)
        return ticket

    def wait(self, ticket: Ticket, timeout_s: float | None = None) -> tuple[AnyReply, dict[str, np.ndarray]]:
        """The reply and its arrays, once per ticket. After a RequestTimeoutError, `wait` may be called again."""
        self._turn_until(ticket, self.timeout_s if timeout_s is None else timeout_s)
        self._tickets.pop(ticket.request.request_id, None)
        assert ticket.reply is not None and ticket.arrays is not None
        if isinstance(ticket.reply, ErrorReply):
            raise error_from(ticket.reply)
        return ticket.reply, ticket.arrays

    # Below: retries and receiving.

    def _next_id(self) -> str:
        self._num_requests += 1
        return f"{self.client_id}-{self._num_requests}"

    def _call(self, request: AnyRequest, reply_type: type[_R]) -> _R:
        ticket = self.submit(request)
        return self._expect(self._wait_or_abandon(ticket)[0], reply_type)

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

    def _expect(self, reply: AnyReply, reply_type: type[_R]) -> _R:
        if not isinstance(reply, reply_type):
            raise ProtocolError(f"{self.address}: answered {type(reply).__name__}, not {reply_type.__name__}")
        return reply

    def _under_way(self) -> list[Ticket]:
        return [ticket for ticket in self._tickets.values() if ticket.reply is None]

    def _settle(self) -> None:
        for ticket in self._under_way():
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
                raise self._timeout(ticket, timeout_s)
            for other in self._under_way():
                if other.next_send <= now:
                    probe(self.address)
                    self._send(other)
            wake = min([deadline, *(other.next_send for other in self._under_way())])
            if self._socket.poll(int(max(0.0, wake - time.monotonic()) * 1000) + 1):
                self._receive()

    def _timeout(self, ticket: Ticket, timeout_s: float) -> KtError:
        if ticket.refused_busy is not None:
            return ticket.refused_busy
        return RequestTimeoutError(
            f"{self.address}: no answer to {type(ticket.request).__name__} ({ticket.request.request_id}) within "
            f"{timeout_s:g} s; it may still be carried out"
            + (", or the server does not accept this client's key" if self.address.startswith("tcp") else "")
        )

    def _send(self, ticket: Ticket) -> None:
        with contextlib.suppress(zmq.Again):  # ZMQ's send queue is full; the next retry is scheduled below
            self._socket.send_multipart(ticket.frames, zmq.NOBLOCK)
        ticket.next_send = time.monotonic() + ticket.resend_s
        ticket.resend_s = min(2 * ticket.resend_s, LAST_RESEND_SECONDS)

    def _receive(self) -> None:
        frames = self._socket.recv_multipart()
        reply, arrays = codec.decode_reply(frames, self._limits)
        ticket = self._tickets.get(reply.request_id)
        if ticket is None:
            if isinstance(reply, ErrorReply) and not reply.request_id:  # the server could not read the request's id
                raise error_from(reply)
            return  # a second answer to a retried request
        if isinstance(reply, ErrorReply) and reply.kind == ServerBusyError.__name__:
            ticket.refused_busy = ServerBusyError(reply.message)
            ticket.next_send = time.monotonic() + ticket.busy_s
            ticket.busy_s = min(2 * ticket.busy_s, LAST_BUSY_SECONDS)
            return
        ticket.reply, ticket.arrays = reply, arrays
        if ticket.abandoned and not isinstance(reply, ErrorReply):
            del self._tickets[reply.request_id]


def _check_keys(address: str, keys: dict[str, str | None]) -> None:
    missing = [what for what, key in keys.items() if not key]
    if missing and (len(missing) < len(keys) or not is_ipc(address)):
        raise InvalidValueError(f"address {address!r}: CURVE takes three keys; missing: {', '.join(missing)}")
    for what, key in keys.items():
        if key:
            key_bytes(key, what)


def _arrays(batch: Batch, reference: npt.ArrayLike | None, samples: Samples | None) -> dict[str, npt.NDArray[Any]]:
    arrays: dict[str, npt.NDArray[Any]] = {"tokens": batch.tokens, "targets": batch.targets, "weights": batch.weights}
    if reference is not None:
        arrays["reference"] = np.asarray(reference, np.float32)
    if samples is not None:
        arrays |= {"sampled": samples.logprobs, "advantages": samples.advantages}
    return arrays
