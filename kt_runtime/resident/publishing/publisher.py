"""Adapter names and versions on the resident's side: the pipeline that moves a name to an adapter version.

Publications, loads, rollbacks and the restoring after a restart run through the same stages. Each name has at most one
operation in progress, others of the name wait. Operations on different names are independent:

1. *prepare*, on a worker thread: read the file, complete fused groups, check, hash, convert to the engine's format, and
   copy into a slot of the engine's memory, if one is free. A small file is read from the moment when its request comes
   (`read_ahead`), not from the engine's next turn, which does the copy then;
2. *probe*, as slices between the engine's batches: one forward pass with the adapter must be finite. It is left out if
   the largest elements show that no pass can overflow (`bounds.py`);
3. *install*, on the engine's thread: the engine registers the prepared adapter under a fresh id;
4. *move*: the resident asks the frontend to move the name to that id; the frontend answers in a later turn;
5. *remember*: the version table changes and the client gets its answer. Then a background thread writes the version's
   directory and `current.json`, with retries while the disk fails (`persistence.py`). A crash before the write leaves
   the previous version intact on disk.

An error in the first four stages leaves the served versions unchanged. Stages 1 and 4 end outside the engine's thread;
their end becomes a decision of rank 0 that every rank applies. The previous version's serving copy is dropped when the
frontend reports the end of its last request.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Callable
from functools import partial

from kt_runtime.adapters import (
    AdapterTensors,
    AdapterVersion,
    StoredName,
    VersionStore,
    VersionTable,
    check_adapter_name,
)
from kt_runtime.errors import ConflictError, KtError, UnknownNameError
from kt_runtime.families import Family
from kt_runtime.mapped import free_elsewhere
from kt_runtime.resident.host import Host
from kt_runtime.resident.publishing.holdings import Holdings
from kt_runtime.resident.publishing.operation import Done, Followed, Forgotten, Operation, is_prepared
from kt_runtime.resident.publishing.owners import Owners
from kt_runtime.resident.publishing.persistence import Persistence
from kt_runtime.resident.publishing.preparation import Preparation, Prepared
from kt_runtime.resident.publishing.probe import OPENING, Probe
from kt_runtime.resident.scheduler import Work
from kt_runtime.resident.training.session import SessionId
from kt_runtime.resident.workers import Workers
from kt_runtime.wire.replies import AdapterInfo, VersionInfo
from kt_runtime.wire.status import UnforgottenName, UnstoredVersion

logger = logging.getLogger(__name__)

MAX_WAITING_OF_NAME = 4
"""Waiting operations of one name, not counting the one in progress: each may hold a copy of an adapter."""


class Publisher:
    """Nothing can be published before `start`.

    `submit` queues slices. `workers` run stage 1, with `lora_id` as the key; `moved(lora_id, error)` is called when
    stage 4 has ended. On these events, the owner of this object must call `probe` (stage 1) and `finish` (stage 4) with
    the same arguments on every rank.

    `probe`: None where there is no twin; what overflows is then found when serving. `is_writer`: this is rank 0, which
    writes the versions to disk.
    """

    def __init__(
        self,
        host: Host,
        family: Family,
        store: VersionStore,
        kept_versions: int,
        probe: Probe | None,
        submit: Callable[[Work], None],
        workers: Workers,
        moved: Callable[[str, Exception | None], None],
        *,
        stores_at_once: bool = False,
        is_writer: bool = True,
        holdings: Holdings | None = None,
    ) -> None:
        self._host, self._family, self._probe = host, family, probe
        self._submit, self._workers, self._moved = submit, workers, moved
        self._table = VersionTable(kept_versions)
        self._persistence = Persistence(store, host.model, at_once=stores_at_once, is_writer=is_writer)
        self._is_writer = is_writer
        self.owners = Owners()
        self.holdings = holdings or Holdings(store.root)
        self._salt, self._ids_given = "", 0
        self._has_asked = False
        self._in_progress: dict[str, Operation] = {}
        self._ahead: dict[str, Operation] = {}
        self._queues: dict[str, deque[Operation]] = {}
        self._forgetting: dict[str, list[Forgotten]] = {}
        self._installed: set[str] = set()
        self._restoring: set[str] = set()
        self._not_restored: dict[str, str] = {}

    # Requests.

    def check(self, name: str, session: SessionId | None, *, take_over: bool) -> None:
        """Runs the checks that need no copy and no file. Raises InvalidValueError, ConflictError, LimitError."""
        check_adapter_name(name)
        self.owners.check(name, session, take_over=take_over)
        self.holdings.check_name(name, {*self._table.current_versions(), *self._queues})
        self.holdings.check_disk(f"adapter {name!r}")
        if len(self._queues.get(name, ())) > MAX_WAITING_OF_NAME:
            raise ConflictError(
                f"adapter {name!r}: {MAX_WAITING_OF_NAME} operations wait for the one in progress; ask again later"
            )

    def publish(
        self,
        name: str,
        adapter: AdapterTensors,
        source: str,
        done: Done,
        *,
        session: SessionId | None = None,
        take_over: bool = False,
    ) -> None:
        """Starts moving `name` to `adapter`, whose tensors must not change from now on.

        `done` may get AdapterError for an adapter that can't be served, and ConflictError if there is no room for
        another adapter or another session owns the name. Raises as `check`.
        """
        self.check(name, session, take_over=take_over)

        def begin(preparation: Preparation) -> Callable[[], Prepared]:
            return lambda: preparation.checked(adapter, source)

        self._add(Operation(name, self._fresh_id(), begin, done, session, claims=True, take_over=take_over))

    def preparation(self, name: str, num_bytes: int = 0) -> Preparation:
        """For a publication whose stage 1 runs before `publish_prepared`. `num_bytes`: as in `Host.reserve_slot`."""
        return Preparation(self._host, self._family, name, self._host.reserve_slot(num_bytes))

    def preparation_without_slot(self, name: str) -> Preparation:
        """As `preparation`, on any thread: what it prepares is `placed` by a preparation with a slot."""
        return Preparation(self._host, self._family, name, None)

    def publish_prepared(
        self,
        name: str,
        preparation: Preparation,
        prepared: Prepared,
        done: Done,
        *,
        session: SessionId | None = None,
        take_over: bool = False,
    ) -> None:
        """As `publish`, after stage 1. `preparation` belongs to the publisher from then on, unless this raises."""
        self.check(name, session, take_over=take_over)
        operation = Operation(name, self._fresh_id(), is_prepared, done, session, claims=True, take_over=take_over)
        operation.preparation, operation.prepared = preparation, prepared
        self._add(operation)

    def load(
        self,
        name: str,
        path: str,
        done: Done,
        *,
        take_over: bool = False,
        ahead: str | None = None,
        follows: Followed | None = None,
    ) -> None:
        """As `publish`, for the PEFT directory or GGUF file at `path`. `done` may get NotFoundError too.

        `ahead`: the key of `read_ahead`, if it was called. `follows`: the content must have this hash, or `done` gets
        AdapterError; the name's owner does not change.
        """
        try:
            self.check(name, None, take_over=take_over or follows is not None)
        except BaseException:
            if ahead is not None:
                self._workers.give_up(ahead)
            raise
        version, source = follows or (None, None)

        def begin(preparation: Preparation) -> Callable[[], Prepared]:
            return lambda: preparation.loaded(path, source, version)

        operation = Operation(name, self._fresh_id(), begin, done, take_over=take_over, path=path)
        operation.ahead, operation.claims, operation.follows = ahead, follows is None, follows is not None
        self._add(operation)

    def read_ahead(self, key: str, name: str, path: str, follows: Followed | None = None) -> None:
        """For a `load` that will follow with this key: begins what needs no turn of the engine, if the file is small.

        On any thread. Nothing is checked that `load` checks.
        """
        preparation, (version, source) = self.preparation_without_slot(name), follows or (None, None)
        read = partial(preparation.loaded_if_small, path, source, version)
        self._workers.begin(key, f"adapter {name!r} ({path})", read)

    def rollback(self, name: str, to: str | None, done: Done) -> None:
        """Starts moving `name` to an earlier version. `done` may get UnknownNameError, ConflictError, AdapterError.

        The name's owner does not change.
        """
        check_adapter_name(name)

        def begin(preparation: Preparation) -> Callable[[], Prepared]:
            version = self._table.rollback_target(name, to)
            return lambda: preparation.stored(self._persistence.load(name, version.hash), version)

        self._add(Operation(name, self._fresh_id(), begin, done, is_rollback=True))

    def forget(self, name: str, done: Forgotten) -> None:
        """Unloads `name`; its versions stay on disk. Operations of the name that wait or run fail.

        Exception: an operation that is moving already (the frontend was asked) completes first.
        """
        queue = self._queues.get(name)
        if queue is None:
            self._forget(name, done)
            return
        withdrawn = ConflictError(f"adapter {name!r} was unloaded before this had ended")
        first, *others = queue
        for session in {operation.session for operation in queue if operation.session is not None}:
            self.owners.refuse(name, session, "was unloaded")
        queue.clear()
        queue.append(first)
        for operation in others:
            if operation.preparation is not None:
                operation.preparation.close()
            self._give_up_ahead(operation)
            operation.done(withdrawn)
        if first.is_moving:
            self._forgetting.setdefault(name, []).append(done)
            return
        self._forget(name, done, had_operations=True)
        self._end(first, withdrawn)

    def drop(self, lora_id: str) -> None:
        """Frees the engine's copy of `lora_id`. An unknown id is ignored."""
        self._installed.discard(lora_id)
        self._host.drop_adapter(lora_id)

    def start(self, salt: str, stored: list[StoredName]) -> None:
        """Restores the names as they were when the server stopped; logs and skips what can't be served.

        `salt` makes this process's ids unique; it is the same on every rank. `stored`: the result of
        `VersionStore.scan`.
        """
        self._salt = salt
        for item in stored:
            try:
                self._table.restore(item.name, item.versions, item.served)
            except KtError as error:
                self._restored(item.name, error)
                continue
            self._restore(item.name)

    def close(self) -> None:
        """Tries once more to write the versions that are not on disk yet."""
        self._persistence.close()
        self.holdings.close()

    # The pipeline.

    def _add(self, operation: Operation) -> None:
        queue = self._queues.setdefault(operation.name, deque())
        queue.append(operation)
        if len(queue) == 1:
            self._prepare(operation)

    def _prepare(self, operation: Operation) -> None:
        self._in_progress[operation.lora_id] = operation
        if operation.prepared is not None:
            self._probe_or_install(operation)
            return
        if operation.ahead is not None:
            self._ahead[operation.ahead] = operation
            if self._workers.has_ended(operation.ahead):
                self._take_ahead(operation)
            return
        self._begin(operation)

    def _begin(self, operation: Operation, num_bytes: int = 0) -> None:
        try:
            operation.preparation = self.preparation(operation.name, num_bytes)
            make = operation.begin(operation.preparation)
        except Exception as error:  # noqa: BLE001 - handed on: `done` answers it
            self._end(operation, error)
            return
        self._workers.begin(operation.lora_id, operation.what, make)

    def probe(self, lora_id: str, error: Exception | None) -> None:
        """Stage 1 has ended: starts the probe, or installs. The id of a withdrawn operation is ignored.

        `lora_id` may be the key of `read_ahead` too.
        """
        if lora_id in self._ahead:
            self._take_ahead(self._ahead[lora_id])
            return
        operation = self._in_progress.get(lora_id)
        if operation is None:
            return
        try:
            if error is not None:
                self._workers.give_up(lora_id)
                raise error
            operation.prepared = self._workers.take(lora_id)
        except Exception as problem:
            self._end(operation, problem)
            if error is None and not self._is_writer:  # rank 0 has it, so requests for it would come
                raise
            return
        self._probe_or_install(operation)

    def _take_ahead(self, operation: Operation) -> None:
        """The job that read ahead has ended: only the copy into a slot is left, or all if it found a large file."""
        key, operation.ahead = operation.ahead, None
        assert key is not None
        del self._ahead[key]
        try:
            found: Prepared | int = self._workers.take(key)
            if isinstance(found, Prepared):
                operation.preparation = self.preparation(operation.name, found.adapter.num_bytes)
                operation.prepared = operation.preparation.placed(found)
        except Exception as error:  # noqa: BLE001 - handed on: `done` answers it
            self._end(operation, error)
            return
        if isinstance(found, int):
            self._begin(operation, found)
        else:
            self._probe_or_install(operation)

    def _probe_or_install(self, operation: Operation) -> None:
        prepared = operation.prepared
        assert prepared is not None
        if self._probe is None or self._probe.is_needless(prepared.adapter, prepared.contents):
            self._install(operation)
            return
        slices = self._probe.slices(prepared.adapter, f"adapter {operation.name!r}")
        self._submit(
            Work(
                f"adapter:{operation.name}",  # not a valid session name, so no clash
                slices,
                lambda _: self._install(operation),
                lambda problem: self._end(operation, problem),
                OPENING,
            )
        )

    def _install(self, operation: Operation) -> None:
        """No pass overflows: installs the adapter and asks the frontend to move the name."""
        if self._in_progress.get(operation.lora_id) is not operation:
            return
        name, lora_id, prepared = operation.name, operation.lora_id, operation.prepared
        assert prepared is not None
        try:
            if operation.claims:  # another session may have claimed the name meanwhile
                self.owners.check(name, operation.session, take_over=operation.take_over)
            self._host.install_adapter(lora_id, name, prepared.version.hash, prepared.servable)
        except Exception as error:  # noqa: BLE001 - handed on: `done` answers it
            self._end(operation, error)
            return
        self._installed.add(lora_id)
        operation.is_moving = True

        def answered(error: Exception | None) -> None:
            self._moved(lora_id, error)

        self._host.move_name(name, prepared.version.hash, lora_id, answered)
        self._has_asked = True

    def has_asked(self) -> bool:
        """Whether the frontend was asked to move a name since the last call."""
        asked, self._has_asked = self._has_asked, False
        return asked

    def finish(self, lora_id: str, error: Exception | None) -> None:
        """The frontend has moved the name, or `error` is why not. Starts the name's next operation."""
        operation = self._in_progress[lora_id]
        outcome: AdapterVersion | Exception = error or operation.version
        try:
            if error is not None:
                self.drop(lora_id)
            else:
                self._remember(operation)
        except Exception as problem:
            outcome = problem
            raise
        finally:
            self._end(operation, outcome)

    def _remember(self, operation: Operation) -> None:
        name, version, prepared = operation.name, operation.version, operation.prepared
        assert prepared is not None
        try:
            if operation.restores:
                self._table.loaded(name, operation.lora_id)
            elif operation.is_rollback:
                self._table.rollback(name, version.hash, version.lora_id)
            else:
                self._table.publish(name, version)
        except (UnknownNameError, ConflictError):  # the version is current already
            self._table.publish(name, version)
        if operation.claims and self.owners.permits(name, operation.session, take_over=operation.take_over):
            self.owners.claim(name, operation.session)
        self._not_restored.pop(name, None)
        if operation.restores:
            return
        known = [item.hash for item in self._table.history(name)]
        served = self._table.served(name)
        self._persistence.put(name, version, prepared.adapter, served, known, is_elsewhere=operation.follows)

    def _end(self, operation: Operation, outcome: AdapterVersion | Exception) -> None:
        """Calls `done` and starts the name's next operation. Ignored for an operation that has ended."""
        if self._in_progress.pop(operation.lora_id, None) is None:
            return
        self._workers.give_up(operation.lora_id)
        self._give_up_ahead(operation)
        prepared, operation.prepared = operation.prepared, None
        free_elsewhere(prepared)
        del prepared
        if operation.preparation is not None:
            operation.preparation.close()
        try:
            operation.done(outcome)
        except Exception:
            logger.exception("adapter %r: the answer to its request failed; serving continues", operation.name)
        for done in self._forgetting.pop(operation.name, ()):
            self._forget(operation.name, done, had_operations=True)
        queue = self._queues[operation.name]
        queue.popleft()
        if queue:
            self._prepare(queue[0])
        else:
            del self._queues[operation.name]

    def _give_up_ahead(self, operation: Operation) -> None:
        key, operation.ahead = operation.ahead, None
        if key is not None:
            self._ahead.pop(key, None)
            self._workers.give_up(key)

    def _forget(self, name: str, done: Forgotten, *, had_operations: bool = False) -> None:
        if had_operations:  # even if the first publication was withdrawn: the next one would undo the unload
            self.owners.lose(name, "was unloaded")
        try:
            former = self._table.unload(name).lora_id
        except UnknownNameError as error:
            done(None if had_operations else error)
            return
        self.owners.lose(name, "was unloaded")
        self._not_restored.pop(name, None)
        self._persistence.forget(name)
        done(former)

    # Restoring and describing.

    def restoring(self) -> list[str]:
        """Names of an earlier run that are still being restored."""
        return sorted(self._restoring)

    def _restore(self, name: str) -> None:
        def done(outcome: AdapterVersion | Exception) -> None:
            self._restoring.discard(name)
            self._restored(name, outcome)

        self._restoring.add(name)

        def begin(preparation: Preparation) -> Callable[[], Prepared]:
            version = self._table.current(name)
            return lambda: preparation.stored(self._persistence.load(name, version.hash), version)

        self._add(Operation(name, self._fresh_id(), begin, done, restores=True))

    def _restored(self, name: str, outcome: AdapterVersion | Exception) -> None:
        if isinstance(outcome, Exception):
            logger.warning("adapter %r of an earlier run is not served: %s", name, outcome)
            self._not_restored[name] = str(outcome)
        else:
            logger.info("adapter %r of an earlier run is served again, version %s", name, outcome.shown_hash)

    def adapters(self) -> list[AdapterInfo]:
        infos = []
        for name, current in self._table.current_versions().items():
            owner = self.owners.of(name)
            infos.append(
                AdapterInfo(
                    name=name,
                    current=current.hash if current.lora_id in self._installed else None,
                    versions=[self._info(name, version) for version in reversed(self._table.history(name))],
                    owner=owner.session.name if owner else None,
                    owned_since=owner.since if owner else None,
                    problem=self._not_restored.get(name),
                )
            )
        return infos

    def unstored(self) -> list[UnstoredVersion]:
        return [
            UnstoredVersion(name=item.name, version=item.version, reason=item.reason, is_waiting=item.is_waiting)
            for item in self._persistence.unstored()
        ]

    def unforgotten(self) -> list[UnforgottenName]:
        return [UnforgottenName(name=name, reason=reason) for name, reason in self._persistence.unforgotten()]

    def _info(self, name: str, version: AdapterVersion) -> VersionInfo:
        reason = self._persistence.reason(name, version.hash)
        return VersionInfo(
            version=version.hash,
            lora_id=version.lora_id if version.lora_id in self._installed else None,
            rank=version.rank,
            alpha=version.alpha,
            source=version.source,
            created_at=version.created,
            stored=reason is None,
            not_stored=reason,
        )

    def _fresh_id(self) -> str:
        assert self._salt
        self._ids_given += 1
        return hashlib.sha256(f"{self._salt}:{self._ids_given}".encode()).hexdigest()[:32]
