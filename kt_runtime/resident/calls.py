"""What each request about a training session does, as a generator of slices that returns the answer.

A session exists from the end of its `CreateSession` to its `CloseSession`. Everything is checked when a request's turn
comes, not when it arrives: the ones before it may create the session that it names.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np

from kt_runtime.adapters import AdapterTensors, AdapterVersion, read_adapter, without_fillers
from kt_runtime.errors import ConflictError, InvalidValueError, UnknownNameError
from kt_runtime.experts import free_spare_memory
from kt_runtime.families import resolve_targets
from kt_runtime.resident import state
from kt_runtime.resident.batches import TrainingBatch
from kt_runtime.resident.call import CallResult
from kt_runtime.resident.executor import Slice, Slices
from kt_runtime.resident.host import Host
from kt_runtime.resident.lora import LoraModules
from kt_runtime.resident.memory import check_available, give_back_freed_memory, keep_freed_memory
from kt_runtime.resident.optimizer import StepSettings
from kt_runtime.resident.preference import check_pairs
from kt_runtime.resident.publishing import Forgotten, Publisher
from kt_runtime.resident.session import Session
from kt_runtime.resident.session_limits import FROZEN_BYTES, TRAINED_BYTES, SessionLimits, num_parameters
from kt_runtime.resident.twin import Twin
from kt_runtime.wire import messages
from kt_runtime.wire.messages import (
    CloseSession,
    CreateSession,
    Forward,
    ForwardBackward,
    ForwardReply,
    Load,
    OptimStep,
    PreferenceLoss,
    Publish,
    Reply,
    Save,
)

SessionRequest = CreateSession | Forward | ForwardBackward | OptimStep | Save | Load | Publish | CloseSession
Arrays = Mapping[str, np.ndarray]


class Answers:
    """How a request is answered: `reply` or `fail`, once each. `later`: from a function run on the writing thread."""

    def __init__(
        self,
        reply: Callable[[Reply, Arrays | None], None],
        fail: Callable[[str, Exception], None],
        later: Callable[[str, Callable[[], Reply]], None],
    ) -> None:
        self.reply, self.fail, self.later = reply, fail, later

    def when_moved(self, request: Any, name: str) -> Callable[[AdapterVersion | Exception], None]:
        """Answers with a `PublishReply` once the name has moved; its time counts from now."""
        started = time.monotonic()

        def done(outcome: AdapterVersion | Exception) -> None:
            if isinstance(outcome, Exception):
                self.fail(request.request_id, outcome)
                return
            reply = messages.PublishReply(
                request_id=request.request_id,
                name=name,
                version=outcome.hash,
                lora_id=outcome.lora_id or "",
                publish_ms=1000 * (time.monotonic() - started),
            )
            self.reply(reply, None)

        return done

    def when_forgotten(self, request: messages.ForgetAdapter) -> Forgotten:
        def done(outcome: str | Exception | None) -> None:
            if isinstance(outcome, Exception):
                self.fail(request.request_id, outcome)
            else:
                self.reply(messages.ForgottenReply(request_id=request.request_id, lora_id=outcome), None)

        return done


class SessionCalls:
    """`microbatch_tokens`: padded tokens that go through a layer at once."""

    def __init__(
        self,
        host: Host,
        twin: Twin,
        lora: LoraModules,
        publisher: Publisher,
        answers: Answers,
        microbatch_tokens: int,
        limits: SessionLimits,
    ) -> None:
        self._host, self._twin, self._lora, self._publisher, self._answers = host, twin, lora, publisher, answers
        self._max_tokens, self._limits = microbatch_tokens, limits
        self._sessions: dict[str, Session] = {}
        self._sessions_made = 0

    def infos(self) -> list[messages.SessionInfo]:
        return [self._info(session) for session in self._sessions.values()]

    def _info(self, session: Session) -> messages.SessionInfo:
        return msgspec.structs.replace(session.info(), publishes=self._publisher.owners.names_of(session.id))

    def slices(self, request: SessionRequest, arrays: Arrays) -> Slices:
        """The request's work. Its result is None: it answers by itself when all has gone well."""
        match request:
            case CreateSession():
                return self._create(request)
            case Forward() | ForwardBackward():
                return self._forward(request, arrays)
            case OptimStep():
                return self._optim_step(request)
            case Save():
                return self._save(request)
            case Load():
                return self._load(request)
            case Publish():
                return self._publish(request)
            case CloseSession():
                return self._close(request)

    @staticmethod
    def opening(request: SessionRequest) -> Slice:
        """What `slices` does first: checks, and all of a request that is not cut further."""
        size = sum(request.lengths) if isinstance(request, Forward | ForwardBackward) else 1
        return Slice(type(request).__name__, size, may_switch=True)

    def _session(self, name: str) -> Session:
        if name not in self._sessions:
            raise UnknownNameError("session", name, self._sessions)
        self._sessions[name].used_at = time.monotonic()
        return self._sessions[name]

    def _create(self, request: CreateSession) -> Slices:
        yield from ()
        if request.session in self._sessions:
            raise ConflictError(f"session {request.session!r} exists already; close it, or choose another name")
        settings = request.lora
        if settings.rank > self._host.max_lora_rank:
            raise InvalidValueError(
                f"LoRA rank {settings.rank}: this server serves adapters up to rank {self._host.max_lora_rank} "
                "(--max-lora-rank)"
            )
        modules = resolve_targets(self._host.config, settings.targets)
        wanted = TRAINED_BYTES * num_parameters(modules, settings.rank)
        self._limits.check(request.session, wanted, self.infos())
        if request.publishes is not None:
            self._publisher.owners.check(request.publishes, None, take_over=request.take_over)
        start_from, reference = self._read(request.start_from), self._read(request.reference)
        if reference is not None:
            frozen = FROZEN_BYTES * sum(pair.a.numel() + pair.b.numel() for pair in reference.modules.values())
            self._limits.check(request.session, wanted + frozen, self.infos())
        if self._host.device.type == "cpu":
            keep_freed_memory()
        self._sessions_made += 1
        session = Session(request.session, f"s{self._sessions_made}", self._twin, self._lora, modules, settings)
        try:
            if start_from is not None:
                masters = state.masters_from(without_fillers(start_from), session, str(request.start_from))
                session.set_masters(masters)
            if reference is not None:
                session.add_reference(without_fillers(reference), self._twin.family.lora_modules(self._host.config))
        except Exception:
            session.close()
            raise
        self._sessions[request.session] = session
        self._publisher.owners.begin(session.id)
        if request.publishes is not None:
            self._publisher.owners.claim(request.publishes, session.id)
        self._answers.reply(messages.SessionReply(request_id=request.request_id, info=self._info(session)), None)

    def _read(self, path: str | None) -> AdapterTensors | None:
        if path is None:
            return None
        directory = state.checked_path(path)
        return read_adapter(directory, self._twin.family, self._host.config, self._host.max_lora_rank)

    def _forward(self, request: Forward | ForwardBackward, arrays: Arrays) -> Slices:
        session, started = self._session(request.session), time.monotonic()
        batch = TrainingBatch(request.lengths, arrays["tokens"], arrays["targets"], arrays["weights"])
        batch.check(self._twin.vocabulary, self._host.context_tokens)
        if isinstance(request.loss, PreferenceLoss):
            check_pairs(request.lengths, batch.weights)
        reference = arrays.get("reference")
        if isinstance(request, Forward):
            slices = session.forward(batch, request.loss, self._max_tokens, model=request.model, reference=reference)
        else:
            slices = session.forward_backward(
                batch, request.loss, self._max_tokens, reference=reference, activations=request.activations
            )
        result: CallResult = yield from slices
        reply = ForwardReply(
            request_id=request.request_id,
            loss=result.loss,
            num_tokens=len(batch.tokens),
            seconds=time.monotonic() - started,
            metrics=result.metrics,
            num_correct=result.num_correct,
            num_computed=result.num_computed,
        )
        self._answers.reply(reply, {"logprobs": result.logprobs.numpy()})

    def _optim_step(self, request: OptimStep) -> Slices:
        session = self._session(request.session)
        settings = StepSettings(
            learning_rate=request.learning_rate,
            beta1=request.beta1,
            beta2=request.beta2,
            epsilon=request.epsilon,
            weight_decay=request.weight_decay,
            max_grad_norm=request.max_grad_norm,
            lora_plus_ratio=request.lora_plus_ratio,
        )
        norm: float = yield from session.optim_step(settings)
        reply = messages.OptimReply(
            request_id=request.request_id, step=session.step, grad_norm=norm, finished_at=time.time()
        )
        self._answers.reply(reply, None)

    def _save(self, request: Save) -> Slices:
        """Copies the state now and writes it beside the engine: the session goes on meanwhile."""
        path = state.checked_path(request.path)
        session = self._session(request.session)
        state.check_target(path, replace=request.replace)
        snapshot = yield from state.snapshot_slices(session, optimizer=request.optimizer)

        def write() -> Reply:
            content = state.write(path, snapshot, self._twin.family, self._host, replace=request.replace)
            return messages.SavedReply(
                request_id=request.request_id, path=str(path), content_hash=content, step=snapshot.saved.step
            )

        self._answers.later(request.request_id, write)

    def _load(self, request: Load) -> Slices:
        yield from ()
        session = self._session(request.session)
        state.load(state.checked_path(request.path), session, self._twin.family, self._host)
        self._answers.reply(messages.SessionReply(request_id=request.request_id, info=self._info(session)), None)

    def _publish(self, request: Publish) -> Slices:
        """Copies the masters; the rest goes on beside the session, whose next request may begin."""
        session = self._session(request.session)
        self._publisher.check(request.name, session.id, take_over=request.take_over)
        copied_bytes = 4 * sum(parameter.numel() for parameter in session.parameters.values())
        check_available(copied_bytes, f"adapter {request.name!r}: a copy of session {session.name!r}")
        done = self._answers.when_moved(request, request.name)
        adapter = yield from state.copied_masters(session)
        self._publisher.publish(
            request.name, adapter, f"session {session.name}", done, session=session.id, take_over=request.take_over
        )

    def _close(self, request: CloseSession) -> Slices:
        yield from ()
        session = self._session(request.session)
        session.close()
        del self._sessions[request.session]
        self._publisher.owners.end(session.id)
        if not self._sessions:
            free_spare_memory()
            give_back_freed_memory()
        self._answers.reply(messages.DoneReply(request_id=request.request_id), None)
