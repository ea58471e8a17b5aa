"""The resident: receives requests of the training protocol, runs them in slices between the engine's batches, replies.

Once per turn, the engine's thread calls `decisions` (rank 0), `apply` with the broadcast decisions (every rank) and
`turn` (every rank). No request makes any of the three raise: both the user's mistakes and internal faults become error
replies, and the engine keeps serving.

Requests that name a session run in order within the session. Other requests (status, adapters by name or directory)
run as they arrive.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import torch

from kt_runtime import __version__, device
from kt_runtime.adapters import StoredName, VersionStore
from kt_runtime.beside import BATCHES
from kt_runtime.errors import KtError
from kt_runtime.experts.machine import placement_refusal
from kt_runtime.families import family_for
from kt_runtime.ranks import HashingGroup
from kt_runtime.resident.config import ResidentSettings
from kt_runtime.resident.decisions import Arrived, Decisions, Ended, Moved, decode, encode
from kt_runtime.resident.fingerprint import WeightsFingerprint, hash_weights_of_ranks
from kt_runtime.resident.handlers import Answers, Arrays, RanksDiffer, SessionHandlers, SessionRequest
from kt_runtime.resident.host import Host
from kt_runtime.resident.memory import resident_set_bytes
from kt_runtime.resident.pacing.budget import Budget
from kt_runtime.resident.pacing.latencies import quantile
from kt_runtime.resident.publishing.holdings import Holdings
from kt_runtime.resident.publishing.operation import Followed
from kt_runtime.resident.publishing.preparation import MOST_AHEAD
from kt_runtime.resident.publishing.probe import Probe
from kt_runtime.resident.publishing.publisher import Publisher
from kt_runtime.resident.scheduler import Plan, TrainingScheduler, Work
from kt_runtime.resident.statuses import Statuses
from kt_runtime.resident.training.session_limits import SessionLimits
from kt_runtime.resident.twin.lora import LoraModules
from kt_runtime.resident.twin.model import Twin
from kt_runtime.resident.wakeup import Wakeup
from kt_runtime.resident.workers import Workers
from kt_runtime.wire import messages, replies
from kt_runtime.wire.failures import error_from, error_reply
from kt_runtime.wire.messages import AnyRequest
from kt_runtime.wire.replies import ErrorReply, Reply
from kt_runtime.wire.server import Incoming, WireServer
from kt_runtime.wire.settings import Settings, changed
from kt_runtime.wire.status import TrainingTurns

logger = logging.getLogger(__name__)

WRITING_THREADS = 4
WRITING_PATIENCE_SECONDS = 900.0
"""Longer than the patience for reads: the writer thread sleeps while the disk flushes (fsync(2))."""

MOVE_SECONDS = 0.003
"""How long a turn waits for the frontend to move a name; streams wait, too."""

CLOSING_SECONDS = 60.0
"""How long the closing server waits for files that are being written."""


class OpenRequests:
    """The sessions' requests that have arrived and are not answered. For the wire server's thread and the engine's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: dict[str, set[str]] = {}

    def begin(self, session: str, request_id: str) -> bool:
        """Whether it is the session's only one."""
        with self._lock:
            requests = self._of.setdefault(session, set())
            requests.add(request_id)
            return len(requests) == 1

    def end(self, session: str, request_id: str) -> None:
        with self._lock:
            requests = self._of.get(session, set())
            requests.discard(request_id)
            if not requests:
                self._of.pop(session, None)


class Server(Protocol):
    """The part of `WireServer` that the resident uses."""

    @property
    def has_pending(self) -> bool: ...

    @property
    def wakeup_fd(self) -> int: ...

    def take(self) -> list[Incoming]: ...

    def answer(self, incoming: Incoming, reply: Reply, arrays: Mapping[str, np.ndarray] | None = None) -> None: ...

    def close(self) -> None: ...


@contextlib.contextmanager
def _training_mode() -> Iterator[None]:
    """Leaves the engine loop's inference mode, whose tensors autograd can't use; gradients stay off until needed."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class Resident:
    """`server` is None on every rank but 0. Not thread-safe."""

    @classmethod
    def start(cls, host: Host, settings: ResidentSettings) -> Resident:
        """For rank 0: builds the twin and listens at `settings.wire_address`. `close` closes the host too.

        From the first turn on, earlier published adapters are restored.
        """
        server = WireServer(settings.wire_address)
        resident = cls(host, settings, server)
        server.on_arrival = resident.arrives
        return resident

    def __init__(
        self,
        host: Host,
        settings: ResidentSettings,
        server: Server | None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host, self._settings, self._server = host, settings, server
        self.family = family_for(host.config)
        self.twin = Twin(host)
        stated = Settings(
            tpot_target_ms=settings.tpot_target_ms,
            ttft_target_ms=settings.ttft_target_ms,
            train_share=settings.train_share,
        )
        self.budget = Budget(stated, clock)
        self.scheduler = TrainingScheduler(
            settings.train_share,
            clock,
            num_ranks=host.num_ranks,
            weight=lambda session: self.budget.settings.weight(session),
        )
        self._workers = Workers("kt-prepare", self._on_ended)
        self._writers = Workers(
            "kt-write", self._on_ended, num_threads=1, max_threads=WRITING_THREADS, patience_s=WRITING_PATIENCE_SECONDS
        )
        self._ended: deque[Ended] = deque()  # appended by other threads
        self._moved: deque[Moved] = deque()
        self._wakeup = Wakeup()
        self._ahead: set[str] = set()  # keys of loads that are read before their requests were taken
        self._open, self._knows_open = OpenRequests(), False
        self._reads_ahead = host.num_ranks == 1 and device.is_host(host.device)
        self._files: dict[str, str] = {}  # key of a writer's job -> request id
        self._unanswered: dict[str, Incoming] = {}
        self._plan = (Plan(), False)
        self._salt = uuid.uuid4().hex
        store = VersionStore(
            Path(settings.adapter_directory),
            self.family,
            host.config,
            host.max_lora_rank,
            settings.kept_versions,
        )
        self._stored = _scan(store, is_writer=server is not None)
        lora = LoraModules(self.twin)
        self.publisher = Publisher(
            host,
            self.family,
            store,
            settings.kept_versions,
            None if host.exchange else Probe(self.twin, lora, host.config),
            self.scheduler.submit,
            self._workers,
            self._on_moved,
            stores_at_once=settings.stores_at_once,
            is_writer=server is not None,
            holdings=Holdings(
                store.root, settings.max_adapters, settings.max_adapter_disk_bytes, measures=server is not None
            ),
        )
        self._weights = host.weights if host.hashing_group is None else _of_ranks(self.twin, host, host.hashing_group)
        self._statuses = Statuses(
            self._weights, self._status, lambda reply: self._answer(reply, None), self._fail, clock, self._wakeup.set
        )
        self._answers = Answers(self._answer, self._fail, self._answer_later)
        self.handlers = SessionHandlers(
            host,
            self.twin,
            lora,
            self.publisher,
            self._answers,
            settings.microbatch_tokens,
            SessionLimits(settings.max_sessions, settings.session_memory_bytes),
            self._workers,
            is_first=server is not None,
        )
        shared, copied = self.twin.shared_bytes, self.twin.copied_bytes
        logger.info("training twin: %d bytes shared with the engine, %d copied", shared, copied)

    # What the engine calls.

    @property
    def wakeups(self) -> list[Any]:
        """Descriptors and ZMQ sockets that wake a sleeping engine: one of them polls readable when there is work."""
        assert self._server is not None
        return [self._server.wakeup_fd, self._wakeup.fd, *self._host.wakeups()]

    def arrives(self, incoming: Incoming) -> None:
        """Prefetches for a new request: reads the file of a load, or copies the masters of a session that has no other
        request, before the engine's next turn. Called on the wire server's thread before the request can be taken. Does
        nothing with several ranks, whose adapters are prepared by decisions only."""
        request = incoming.request
        if isinstance(request, SessionRequest):
            is_alone = self._open.begin(request.session, request.request_id)
            if isinstance(request, messages.Publish) and self._reads_ahead and self._knows_open and is_alone:
                self.handlers.publish_ahead(request)
        is_load = isinstance(request, (messages.LoadAdapter, messages.FollowAdapter))
        if is_load and self._reads_ahead and len(self._ahead) < MOST_AHEAD:
            key = f"load {request.request_id}"
            self.publisher.read_ahead(key, request.name, request.path, _followed(request))
            self._ahead.add(key)

    def has_work(self) -> bool:
        """True while the engine should not sleep: slices to run, requests to take, answers that wait for a turn.

        Pending jobs of other threads do not count: `wakeups` signals their end.
        """
        arrived = self._server is not None and self._server.has_pending
        ended = bool(self._ended or self._moved) or self._statuses.is_due
        return arrived or ended or not self.scheduler.is_idle

    def decisions(self) -> list[bytes]:
        """Rank 0: the payloads of this turn for every rank's `apply`; empty if there is nothing to do."""
        assert self._server is not None
        self._wakeup.clear()
        self._host.poll()
        self._statuses.answer_due()
        # Requests that came while the twin was built were not announced: all of them have been answered.
        self._knows_open = self._knows_open or not (self._unanswered or self._server.has_pending)
        arrived = []
        for incoming in self._server.take():
            self._unanswered[incoming.request_id] = incoming
            arrays = [(name, value.dtype.str, value.tobytes()) for name, value in incoming.arrays.items()]
            arrived.append(Arrived(incoming.request, arrays))
        ended = [self._ended.popleft() for _ in range(len(self._ended))]
        moved = [self._moved.popleft() for _ in range(len(self._moved))]
        load = self._host.load()
        is_serving = load.is_serving
        plan = self.scheduler.plan(is_serving, self.budget.turn(load), arrives=bool(arrived))
        held_bytes = self.publisher.holdings.measured_bytes
        decided, self._salt = Decisions(arrived, ended, moved, plan, is_serving, self._salt, held_bytes), ""
        return [] if decided.is_empty else [encode(decided)]

    def follow(self) -> None:
        """Every rank but 0, in place of `decisions`."""
        self._host.poll()

    def apply(self, payloads: Sequence[bytes]) -> None:
        """Every rank: applies the broadcast payloads of `decisions`. Slices run later, in `turn`."""
        with _training_mode():
            for payload in payloads:
                decided = decode(payload)
                self.publisher.holdings.decide(decided.adapter_bytes)
                if decided.salt:
                    self.publisher.start(decided.salt, self._stored)
                    self._stored = []
                ended: tuple[Ended | Moved, ...] = (*decided.ended, *decided.moved)
                for each in ended:
                    self._resume(each)
                for arrived in decided.arrived:
                    arrays = {name: np.frombuffer(data, kind) for name, kind, data in arrived.arrays}
                    self._dispatch(arrived.request, arrays)
                self._plan = (decided.plan, decided.is_serving)

    def turn(self) -> None:
        """Every rank: runs the slices that the last `apply` planned."""
        (plan, is_serving), self._plan = self._plan, (Plan(), False)
        with _training_mode():
            self.scheduler.run_short(is_serving)
        # The plan was made before this turn's requests arrived. With targets, their prefill has priority over training.
        load = self._host.load()
        self.budget.batch(load)
        if plan.num_slices and not (self.budget.settings.has_target and load.waiting):
            # Streams wait for these slices as for a batch. Copies of masters would double the time of an
            # optimizer step's slice.
            with _training_mode(), BATCHES.computing() if is_serving else contextlib.nullcontext():
                before = self.scheduler.share_of_time.total_seconds
                self.scheduler.run(plan, is_serving)
                self.budget.ran(self.scheduler.share_of_time.total_seconds - before)
        if self.publisher.has_asked() and self._host.num_ranks == 1:
            self._settle_moves()

    def holds_prompts(self) -> bool:
        """Whether this turn's batch is a decode step although prompts wait. With one rank only: clocks differ."""
        return self._host.num_ranks == 1 and self.budget.holds(self._host.load())

    def _settle_moves(self) -> None:
        """The frontend mostly answers within a millisecond. The publication's client then need not wait for a batch
        until the next turn. With several ranks only decisions may have effects."""
        self._host.settle_moves(MOVE_SECONDS)
        with _training_mode():
            while self._moved:
                self._resume(self._moved.popleft())

    def close(self) -> None:
        """Ends training, finishes pending writes, stops listening. Unfinished training calls leave no effects."""
        self.scheduler.close()
        self._writers.finish(CLOSING_SECONDS)
        self._writers.close()
        self._workers.close()
        self.publisher.close()
        if self._server is not None:
            for key in [key for key in self._files if self._writers.has_ended(key)]:
                self._answer_written(key)
            self._server.close()
        self._weights.close()
        self._host.close()
        self._wakeup.close()

    # Requests.

    def _dispatch(self, request: AnyRequest, arrays: Arrays) -> None:
        if isinstance(request, SessionRequest):
            request_id = request.request_id
            slices = self.handlers.slices(request, arrays)
            self.scheduler.submit(
                Work(
                    request.session,
                    slices,
                    lambda _: None,
                    lambda error: self._fail_session(request_id, error),
                    self.handlers.opening(request),
                )
            )
            return
        try:
            reply = self._immediate(request)
        except Exception as error:  # noqa: BLE001 - answered and logged by _fail
            self._fail(request.request_id, error)
            return
        if reply is not None:
            self._answer(reply, None)

    def _resume(self, ended: Ended | Moved) -> None:
        """Continues the operation that waited for `ended`: a session's work, a save's answer or a publication."""
        error = None if ended.error is None else error_from(ended.error)
        try:
            if isinstance(ended, Moved):
                self.publisher.finish(ended.lora_id, error)
            elif self.handlers.written(ended.key):
                self._answer_written(ended.key)
            elif not self.scheduler.resume(ended.key, error):
                self.publisher.probe(ended.key, error)
        except Exception as problem:
            if device.is_lost(problem) or self._differs(error):
                raise
            logger.exception("the operation that waited for %s failed; serving continues", ended)

    def _differs(self, error: Exception | None) -> bool:
        """Whether this rank has failed where rank 0, which reported `error`, has not."""
        return self._server is None and error is None

    def _immediate(self, request: AnyRequest) -> Reply | None:
        """Handles a request without a session. Returns the reply, or None if the reply follows later."""
        match request:
            case messages.GetStatus():
                if self._server is not None:
                    self._statuses.ask(request)
                else:  # rank 0 hashes with the others
                    self._weights.future(fresh=request.verify_weights)
                return None
            case messages.ListAdapters():
                return replies.AdaptersReply(request_id=request.request_id, adapters=self.publisher.adapters())
            case messages.LoadAdapter() | messages.FollowAdapter():
                done, key = self._answers.when_moved(request, request.name), f"load {request.request_id}"
                ahead = key if key in self._ahead else None
                self._ahead.discard(key)
                takes, follows = getattr(request, "take_over", False), _followed(request)
                self.publisher.load(request.name, request.path, done, take_over=takes, ahead=ahead, follows=follows)
                return None
            case messages.RollbackAdapter():
                done = self._answers.when_moved(request, request.name)
                self.publisher.rollback(request.name, request.adapter_version, done)
                return None
            case messages.ForgetAdapter():
                self.publisher.forget(request.name, self._answers.when_forgotten(request))
                return None
            case messages.DropAdapter():
                self.publisher.drop(request.lora_id)
            case messages.ChangeSettings():
                return replies.SettingsReply(request_id=request.request_id, settings=self._changed(request.changes))
        return replies.DoneReply(request_id=request.request_id)

    def _changed(self, changes: Mapping[str, Any]) -> Settings:
        self.budget.settings = changed(self.budget.settings, changes)
        self.scheduler.training_share = self.budget.settings.train_share
        return self.budget.settings

    def training_turns(self) -> TrainingTurns:
        """How training shares the time with serving, now."""
        measured, budget = self._host.latencies, self.budget.latest
        return TrainingTurns(
            settings=self.budget.settings,
            tpot_p50_ms=1000 * quantile(measured.per_token, 0.5),
            tpot_p95_ms=1000 * quantile(measured.per_token, 0.95),
            ttft_p50_ms=1000 * quantile(measured.first_token, 0.5),
            ttft_p95_ms=1000 * quantile(measured.first_token, 0.95),
            num_requests=len(measured.first_token),
            share_used=self.scheduler.share_of_time(),
            serving_s=self.budget.serving_seconds,
            training_s=self.scheduler.share_of_time.total_seconds,
            budget_ms=None if budget.whole_call else 1000 * budget.seconds,
            slices=self.scheduler.slices_run,
            parts=self.scheduler.parts_run,
        )

    def _status(self, request_id: str, fingerprint: str) -> Reply:
        decoded, not_exact = self._host.decoded, self._host.not_exact
        return replies.StatusReply(
            request_id=request_id,
            runtime_version=__version__,
            sglang_version=self._host.engine_version,
            model=self._host.model,
            model_directory=self._host.model_directory,
            family=self.family.name,
            fingerprint=fingerprint,
            dtype=str(self._host.dtype).removeprefix("torch."),
            device=str(self._host.device),
            max_lora_rank=self._host.max_lora_rank,
            context_tokens=self._host.context_tokens,
            weights_shared_bytes=self.twin.shared_bytes,
            weights_copied_bytes=self.twin.copied_bytes,
            expert_format=self._host.experts.format,
            expert_isa=self._host.experts.isa,
            expert_bytes=self._host.experts.resident_bytes,
            expert_threads=self._host.experts.num_threads,
            expert_node_bytes=self._host.experts.node_bytes,
            expert_placement=placement_refusal() or "",
            step=self._host.step,
            step_exceptions=self._host.step_exceptions,
            exact=not not_exact,
            not_exact=not_exact,
            gpu_experts=self._host.gpu_experts,
            expert_streaming=self._host.expert_streaming,
            kept_routes=None if self._host.routes is None else self._host.routes.status(),
            training_turns=self.training_turns(),
            step_decode_batches=decoded.step_batches,
            step_decode_tokens=decoded.step_tokens,
            step_decode_seconds=decoded.step_seconds,
            head_decode_seconds=decoded.head_seconds,
            sampling_decode_seconds=decoded.sampling_seconds,
            chunked_prefill_tokens=self._host.chunked_prefill_tokens,
            microbatch_tokens=self._settings.microbatch_tokens,
            rss_bytes=resident_set_bytes(),
            ranks=self._host.ranks(),
            sessions=[
                msgspec.structs.replace(info, num_requests=self.scheduler.num_works(info.session))
                for info in self.handlers.infos()
            ],
            cache=self._host.cache_tiers(),
            not_stored=self.publisher.unstored(),
            not_forgotten=self.publisher.unforgotten(),
            restoring=self.publisher.restoring(),
        )

    # Answers.

    def _answer(self, reply: Reply, arrays: Arrays | None) -> None:
        incoming = self._unanswered.pop(reply.request_id, None)
        if incoming is not None and isinstance(incoming.request, SessionRequest):
            self._open.end(incoming.request.session, incoming.request_id)
        if incoming is not None and self._server is not None:
            self._server.answer(incoming, reply, arrays)

    def _fail(self, request_id: str, error: Exception) -> None:
        """Answers with the error. Raises it if the device is lost: the owner of the turns ends the process."""
        if device.is_lost(error):
            raise error
        reply = error_reply(request_id, error)
        if reply.category == "server":
            logger.error("request %s failed; serving continues", request_id, exc_info=error)
        self._answer(reply, None)

    def _fail_session(self, request_id: str, error: Exception) -> None:
        """Answers with the error, or raises it if the other ranks may not have it: they would wait for this rank. Also
        raises the loss of a rank."""
        is_everyone_s = isinstance(error, KtError) and not isinstance(error, ConnectionError)
        if isinstance(error, RanksDiffer) or (self._host.exchange is not None and not is_everyone_s):
            raise error
        self._fail(request_id, error)

    def _answer_later(self, key: str, request_id: str, what: str, function: Callable[[], Reply]) -> None:
        """Starts `function` on a writer thread, on rank 0 only; the reply is sent in the turn after its end."""
        if self._server is not None:
            self._files[key] = request_id
            self._writers.begin(key, what, function)

    def _answer_written(self, key: str) -> None:
        request_id = self._files.pop(key, None)
        if request_id is None:  # rank 0 writes, not this rank
            return
        try:
            reply: Reply = self._writers.take(key)
        except Exception as error:  # noqa: BLE001 - answered and logged by _fail
            self._fail(request_id, error)
        else:
            self._answer(reply, None)

    def _on_ended(self, key: str, error: Exception | None) -> None:
        """Called by other threads. Rank 0's decisions pass the event to the other ranks."""
        if self._server is not None:
            self._ended.append(Ended(key, _as_reply(error)))
            self._wakeup.set()

    def _on_moved(self, lora_id: str, error: Exception | None) -> None:
        self._moved.append(Moved(lora_id, _as_reply(error)))


def _of_ranks(twin: Twin, host: Host, group: HashingGroup) -> WeightsFingerprint:
    return WeightsFingerprint(partial(hash_weights_of_ranks, twin.parts(), host.experts, group))


def _followed(request: messages.LoadAdapter | messages.FollowAdapter) -> Followed | None:
    return (request.adapter_version, request.source) if isinstance(request, messages.FollowAdapter) else None


def _as_reply(error: Exception | None) -> ErrorReply | None:
    return None if error is None else error_reply("", error)


def _scan(store: VersionStore, *, is_writer: bool) -> list[StoredName]:
    """The adapters that an earlier run stored. Problems are logged, not raised: the model is loaded already."""
    problems = store.clean() if is_writer else []
    found, more = store.scan()
    for problem in (*problems, *more):
        logger.warning("adapter directory: %s", problem)
    return found
