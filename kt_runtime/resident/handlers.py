"""The handlers of requests about training sessions. A handler is a generator of slices, and sends the reply itself.

A session exists from the end of its `CreateSession` to its `CloseSession`. The checks run when the handler starts, not
when the request arrives: an earlier request in the queue may create the session that this one names.

Worker threads access files. Meanwhile the session's work pauses (`scheduler.Pause`), so the session's later requests
wait.

Several ranks run the same handlers with the same slices, each on its part of the model and of the session. What the
machine decides (memory, files that may be there) rank 0 alone asks, and the others get its answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kt_runtime import device, spare
from kt_runtime.adapters import AdapterVersion
from kt_runtime.errors import ConflictError, InvalidValueError, UnknownNameError
from kt_runtime.experts import free_spare_memory
from kt_runtime.families import resolve_targets
from kt_runtime.resident.host import Host
from kt_runtime.resident.memory import MOST_KEPT_BYTES, check_available, keep_freed_memory, return_freed_memory
from kt_runtime.resident.publishing.operation import Forgotten
from kt_runtime.resident.publishing.preparation import MOST_AHEAD, SMALL_BYTES, Preparation, Prepared
from kt_runtime.resident.publishing.publisher import Publisher
from kt_runtime.resident.scheduler import Pause, Slice, Slices
from kt_runtime.resident.training import checkpoint
from kt_runtime.resident.training.call import CallResult
from kt_runtime.resident.training.opening import Opening, Start, read_start
from kt_runtime.resident.training.optimizer import StepSettings
from kt_runtime.resident.training.policy import check_samples
from kt_runtime.resident.training.preference import check_pairs
from kt_runtime.resident.training.replay import CallRoutes, find_routes
from kt_runtime.resident.training.session import Session
from kt_runtime.resident.training.session_limits import SessionLimits, num_parameters
from kt_runtime.resident.twin.batches import TrainingBatch
from kt_runtime.resident.twin.lora import LoraModules
from kt_runtime.resident.twin.model import Twin
from kt_runtime.resident.workers import Workers
from kt_runtime.wire import messages, replies
from kt_runtime.wire.batch import Samples
from kt_runtime.wire.messages import (
    CloseSession,
    CreateSession,
    Forward,
    ForwardBackward,
    Load,
    OptimStep,
    PolicyLoss,
    PreferenceLoss,
    Publish,
    Save,
)
from kt_runtime.wire.replies import ForwardReply, Reply
from kt_runtime.wire.status import SessionInfo

MAX_WAITING_SAVES = 2
"""Unfinished saves of one session: each holds a copy of the session's state in memory."""

SessionRequest = CreateSession | Forward | ForwardBackward | OptimStep | Save | Load | Publish | CloseSession
Arrays = Mapping[str, np.ndarray]


class RanksDiffer(RuntimeError):
    """A rank can't do what rank 0 has done, so it must not continue."""


class Answers:
    """Callbacks that answer a request: exactly one of `reply`, `fail`, `later` is called, once per request.

    `later(key, request id, what, function)`: `function` runs on a writer thread of rank 0, and its result is the reply.
    When `function` has ended, every rank is notified with `key`.
    """

    def __init__(
        self,
        reply: Callable[[Reply, Arrays | None], None],
        fail: Callable[[str, Exception], None],
        later: Callable[[str, str, str, Callable[[], Reply]], None],
    ) -> None:
        self.reply, self.fail, self.later = reply, fail, later

    def when_moved(self, request: Any, name: str) -> Callable[[AdapterVersion | Exception], None]:
        """A callback that sends a `PublishReply` when the name has moved; `publish_ms` counts from this call."""
        started = time.monotonic()

        def done(outcome: AdapterVersion | Exception) -> None:
            if isinstance(outcome, Exception):
                self.fail(request.request_id, outcome)
                return
            reply = replies.PublishReply(
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
                self.reply(replies.ForgottenReply(request_id=request.request_id, lora_id=outcome), None)

        return done


class SessionHandlers:
    """`microbatch_tokens`: padded tokens that go through a layer at once.

    `workers`: when a job ends, the owner of `workers` calls the scheduler's `resume` with the job's key, on every rank.
    `is_first`: this is rank 0.
    """

    def __init__(
        self,
        host: Host,
        twin: Twin,
        lora: LoraModules,
        publisher: Publisher,
        answers: Answers,
        microbatch_tokens: int,
        limits: SessionLimits,
        workers: Workers,
        *,
        is_first: bool = True,
    ) -> None:
        self._host, self._twin, self._lora, self._publisher, self._answers = host, twin, lora, publisher, answers
        self._max_tokens, self._limits = microbatch_tokens, limits
        self._workers, self._is_first = workers, is_first
        self._sessions: dict[str, Session] = {}
        self._openings: dict[str, Opening] = {}
        self._writing: dict[str, str] = {}  # key of a save -> its session
        self._ahead: set[str] = set()  # keys of publications that are prepared before their requests were taken
        self._sessions_made = self._jobs_begun = self._saves_begun = 0

    def infos(self) -> list[SessionInfo]:
        return [self._info(session) for session in self._sessions.values()]

    def _info(self, session: Session) -> SessionInfo:
        return msgspec.structs.replace(session.info(), publishes=self._publisher.owners.names_of(session.id))

    def slices(self, request: SessionRequest, arrays: Arrays) -> Slices:
        """The request's handler. It returns None and sends the reply itself; errors are raised."""
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
        """The first slice of `slices`: the checks, or the whole request if the handler does not split it."""
        size = sum(request.lengths) if isinstance(request, Forward | ForwardBackward) else 1
        return Slice(type(request).__name__, size, may_switch=True, is_short=isinstance(request, Publish))

    def _session(self, name: str) -> Session:
        if name not in self._sessions:
            raise UnknownNameError("session", name, self._sessions)
        self._sessions[name].used_at = time.monotonic()
        return self._sessions[name]

    def _on_worker(self, what: str, make: Callable[[], Any], *, is_short: bool = False) -> Slices:
        """Pauses the work while a worker thread runs `make`; returns the result of `make`, or raises its error.

        `is_short`: the work's next slice, after the function, is short (`Slice.is_short`).
        """
        self._jobs_begun += 1
        key = f"session job {self._jobs_begun}"
        self._workers.begin(key, what, make)
        try:
            yield Pause(key, Slice("result", is_short=is_short))
            return self._taken(key)
        finally:
            self._workers.give_up(key)

    def _on_first(self, what: str, make: Callable[[], None], *, is_short: bool = False) -> Slices:
        """As `_on_worker`, but only rank 0 runs `make`. The other ranks wait, and raise its error."""
        yield from self._on_worker(what, make if self._is_first else lambda: None, is_short=is_short)

    def _taken(self, key: str) -> Any:
        """The result of a job that has succeeded on rank 0. Raises RanksDiffer if it has not here."""
        try:
            return self._workers.take(key)
        except Exception as error:
            if self._is_first:
                raise
            raise RanksDiffer(f"rank 0 has done this, and this rank can't: {error}") from error

    def publish_ahead(self, request: Publish) -> None:
        """Begins what `slices` of this request would begin in the engine's next turn, if the adapter is small.

        On any thread, while the session has no other request: its masters must not change before `slices` has run.
        """
        session = self._sessions.get(request.session)
        if session is None or len(self._ahead) >= MOST_AHEAD:
            return
        if self._served_bytes(session) >= SMALL_BYTES:
            return
        preparation = self._publisher.preparation_without_slot(request.name)
        key = f"publish {request.request_id}"
        self._workers.begin(key, _what_of(request), lambda: _version_of(session, request, preparation))
        self._ahead.add(key)

    def _served_bytes(self, session: Session) -> int:
        """Bytes of the session's adapter in the engine's dtype."""
        return num_parameters(session.modules, session.settings.rank) * self._host.dtype.itemsize

    def _taken_ahead(self, request: Publish) -> Generator[Slice | Pause, None, Prepared | None]:
        """The result of `publish_ahead`, None if it did not begin. Waits for its end also where the request fails: the
        session's next request may change the masters."""
        key = f"publish {request.request_id}"
        if key not in self._ahead:
            return None
        self._ahead.discard(key)
        try:
            if not self._workers.has_ended(key):
                yield Pause(key, Slice("result", is_short=True))
            taken: Prepared = self._workers.take(key)
        finally:
            self._workers.give_up(key)
        return taken

    def _create(self, request: CreateSession) -> Slices:
        start_from, reference = _checked(request.start_from), _checked(request.reference)
        opening = self._opening(request)
        self._openings[request.session] = opening
        try:
            start: Start = yield from self._on_worker(
                _what(request.session, start_from, reference),
                lambda: read_start(opening, start_from, reference, self._twin.family, self._host),
            )
            session = yield from self._placed(opening, start)
            try:
                if request.publishes is not None:  # another session may have claimed the name meanwhile
                    self._publisher.owners.check(request.publishes, None, take_over=request.take_over)
            except ConflictError:
                yield from session.closing()
                raise
        finally:
            del self._openings[request.session]
        self._sessions[request.session] = session
        self._publisher.owners.begin(session.id)
        if request.publishes is not None:
            self._publisher.owners.claim(request.publishes, session.id)
        self._answers.reply(replies.SessionReply(request_id=request.request_id, info=self._info(session)), None)

    def _opening(self, request: CreateSession) -> Opening:
        """Runs all checks that need no file."""
        if request.session in self._sessions:
            raise ConflictError(f"session {request.session!r} exists already; close it, or choose another name")
        settings = request.lora
        if settings.rank > self._host.max_lora_rank:
            raise InvalidValueError(
                f"LoRA rank {settings.rank}: this server serves adapters up to rank {self._host.max_lora_rank} "
                "(--max-lora-rank)"
            )
        modules = resolve_targets(self._host.config, settings.targets)
        opening = Opening(request.session, f"s{self._sessions_made + 1}", settings, modules)
        self._limits.check(request.session, opening.num_bytes, self._counted())
        if request.publishes is not None:
            self._publisher.owners.check(request.publishes, None, take_over=request.take_over)
        if device.is_host(self._host.device):
            split = self._twin.split
            keep_freed_memory(MOST_KEPT_BYTES if split is None else split.freed.most_bytes)
            spare.keep()
        self._sessions_made += 1
        return opening

    def _placed(self, opening: Opening, start: Start) -> Generator[Slice | Pause, None, Session]:
        """Creates the session from the `start` that was read. After an error the session does not exist."""
        name, settings = opening.name, opening.settings
        del self._openings[name]
        opening = replace(opening, frozen_bytes=start.frozen_bytes)
        try:
            self._limits.check(name, opening.num_bytes, self._counted())
        finally:
            self._openings[name] = opening
        if self._twin.split is not None:
            yield from self._twin.split.fetch()
        parameters = yield from self._lora.create(
            opening.key,
            opening.modules,
            start.masters,
            rank=settings.rank,
            alpha=settings.alpha,
            dropout=settings.dropout,
        )
        session = Session(name, opening.key, self._twin, self._lora, opening.modules, settings, parameters)
        try:
            if start.reference is not None:
                of_model = self._twin.family.lora_modules(self._host.config)
                yield from session.add_reference(start.reference, of_model)
        except BaseException:
            session.close()
            raise
        return session

    def _counted(self) -> list[SessionInfo]:
        """The sessions that count against the limits: open ones, and those being opened."""
        return [*self.infos(), *(opening.info() for opening in self._openings.values())]

    def _forward(self, request: Forward | ForwardBackward, arrays: Arrays) -> Slices:
        session, started = self._session(request.session), time.monotonic()
        batch = TrainingBatch(request.lengths, arrays["tokens"], arrays["targets"], arrays["weights"])
        batch.check(self._twin.vocabulary, self._host.context_tokens)
        if isinstance(request.loss, PreferenceLoss):
            check_pairs(request.lengths, batch.weights)
        reference, samples = arrays.get("reference"), None
        if isinstance(request.loss, PolicyLoss):
            samples = Samples(arrays["sampled"], arrays["advantages"])
            check_samples(samples, batch.weights)
        routes = yield from self._routes(request, session, batch)
        if isinstance(request, Forward):
            slices = session.forward(
                batch,
                request.loss,
                self._max_tokens,
                model=request.model,
                reference=reference,
                samples=samples,
                routes=routes,
            )
        else:
            slices = session.forward_backward(
                batch,
                request.loss,
                self._max_tokens,
                reference=reference,
                samples=samples,
                activations=request.activations,
                routes=routes,
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

    def _routes(
        self, request: Forward | ForwardBackward, session: Session, batch: TrainingBatch
    ) -> Generator[Slice, None, CallRoutes | None]:
        """The recorded experts that the call asks for. Raises InvalidValueError, or ConflictError if none are kept."""
        if request.routing_replay == "off":
            if request.rollout_version is not None:
                raise InvalidValueError("rollout_version works with routing_replay: compare or rollout only")
            return None
        if isinstance(request, Forward) and request.model != "policy":
            raise InvalidValueError(
                f"routing_replay: {request.routing_replay} works with model policy only, not {request.model}"
            )
        store = self._host.routes
        if store is None:
            raise ConflictError(
                f"routing_replay: {request.routing_replay}: this server keeps no routes; start it with "
                "--routing-replay SIZE, such as 256MiB"
            )
        versions = session.samplers if request.rollout_version is None else [request.rollout_version]
        return (yield from find_routes(store, versions, batch, forced=request.routing_replay == "rollout"))

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
        reply = replies.OptimReply(
            request_id=request.request_id, step=session.step, grad_norm=norm, finished_at=time.time()
        )
        self._answers.reply(reply, None)

    def _save(self, request: Save) -> Slices:
        """Copies the state now; a writer thread writes the copy while the session continues."""
        path = checkpoint.checked_path(request.path)
        session = self._session(request.session)
        if self._publisher.holdings.is_inside(path):
            self._publisher.holdings.check_disk(str(path))
        waiting = sum(name == request.session for name in self._writing.values())
        if waiting >= MAX_WAITING_SAVES:
            raise ConflictError(
                f"session {session.name!r}: {waiting} saves of it are being written; each is a copy of its state, so "
                "ask again when they are answered"
            )
        copied_bytes = checkpoint.copied_bytes(session, optimizer=request.optimizer)

        def check() -> None:
            checkpoint.check_target(path, replace=request.replace)
            check_available(copied_bytes, f"{path}: a copy of session {session.name!r}")

        yield from self._on_first(str(path), check)
        snapshot = yield from checkpoint.snapshot(session, optimizer=request.optimizer)

        def write() -> Reply:
            content = checkpoint.write(path, snapshot, self._twin.family, self._host, replace=request.replace)
            return replies.SavedReply(
                request_id=request.request_id, path=str(path), content_hash=content, step=snapshot.saved.step
            )

        self._saves_begun += 1
        key = f"save {self._saves_begun}"
        self._writing[key] = request.session
        self._answers.later(key, request.request_id, str(path), write)

    def written(self, key: str) -> bool:
        """Every rank: the save that `Answers.later` started under `key` has ended or failed. False for another key."""
        return self._writing.pop(key, None) is not None

    def _load(self, request: Load) -> Slices:
        session, path = self._session(request.session), checkpoint.checked_path(request.path)
        saved: checkpoint.Saved = yield from self._on_worker(
            str(path), lambda: checkpoint.read(path, session, self._twin.family, self._host)
        )
        yield from checkpoint.restore(session, saved)
        self._answers.reply(replies.SessionReply(request_id=request.request_id, info=self._info(session)), None)

    def _publish(self, request: Publish) -> Slices:
        """The session pauses while a worker makes a version of its masters, but not while the name moves. A small one
        was begun before (`publish_ahead`), and is copied into a slot here."""
        ahead = yield from self._taken_ahead(request)
        session = self._session(request.session)
        self._publisher.check(request.name, session.id, take_over=request.take_over)
        answered = self._answers.when_moved(request, request.name)

        def done(outcome: AdapterVersion | Exception) -> None:
            if not isinstance(outcome, Exception):
                session.note_published(outcome.hash)
            answered(outcome)

        session.copies.publishing()
        preparation = self._publisher.preparation(request.name, self._served_bytes(session))
        try:
            if ahead is not None:
                prepared = preparation.placed(ahead)
            elif self._host.exchange is not None:
                prepared = yield from self._version_over_ranks(session, request, preparation)
            else:
                make = partial(_version_of, session, request, preparation)
                prepared = yield from self._on_worker(_what_of(request), make, is_short=True)
            self._publisher.publish_prepared(
                request.name, preparation, prepared, done, session=session.id, take_over=request.take_over
            )
        except BaseException:
            preparation.close()
            raise

    def _version_over_ranks(
        self, session: Session, request: Publish, preparation: Preparation
    ) -> Generator[Slice | Pause, None, Prepared]:
        """Ranks exchange their parts of the masters, then each prepares the whole version, as of a loaded file."""
        what, copied_bytes = _what_of(request), checkpoint.copied_bytes(session, optimizer=False)
        yield from self._on_first(what, lambda: _check_memory(session, request, copied_bytes), is_short=True)
        adapter = yield from checkpoint.copied_masters(session)
        prepared: Prepared = yield from self._on_worker(
            what, lambda: preparation.checked(adapter, f"session {session.name}"), is_short=True
        )
        return prepared

    def _close(self, request: CloseSession) -> Slices:
        session = self._session(request.session)
        yield from session.closing()
        del self._sessions[request.session]
        self._publisher.owners.end(session.id)
        if self._twin.split is not None and not self._sessions and not self._openings:
            self._twin.split.forget()
        if not self._sessions:
            free_spare_memory()
            spare.free()
            return_freed_memory()
        self._answers.reply(replies.DoneReply(request_id=request.request_id), None)


def _version_of(session: Session, request: Publish, preparation: Preparation) -> Prepared:
    """A version of the session's masters, which must not change meanwhile. Runs on a worker thread. Raises
    ConflictError if memory does not suffice."""
    _check_memory(session, request, checkpoint.copied_bytes(session, optimizer=False))
    adapter, contents = checkpoint.taken_masters(session)
    return preparation.checked(adapter, f"session {session.name}", contents)


def _check_memory(session: Session, request: Publish, copied_bytes: int) -> None:
    check_available(copied_bytes, f"adapter {request.name!r}: a copy of session {session.name!r}")


def _what_of(request: Publish) -> str:
    return f"adapter {request.name!r}"


def _checked(path: str | None) -> Path | None:
    return None if path is None else checkpoint.checked_path(path)


def _what(session: str, *paths: Path | None) -> str:
    named = " and ".join(str(path) for path in paths if path is not None)
    return f"session {session!r}" + (f" ({named})" if named else "")
