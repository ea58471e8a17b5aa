"""Adapter names and versions on the resident's side: install a copy, move the name, remember, write down.

A publication goes through four steps; an error in the first three leaves the served versions as they were:

1. the adapter is completed, validated and hashed;
2. a copy is installed in the engine under a fresh id;
3. the frontend is asked to let the name mean that id, and answers in a later turn (`finish`);
4. the table of versions changes and the client is answered; only then the background thread writes the version's
   directory, then `current.json`. A crash before that leaves the version before on disk, whole.

Operations on one name wait for each other; on different names they may be under way at once. The copy of the former
version is dropped when the frontend says that its last request has ended.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor as ThreadExecutor
from dataclasses import dataclass
from typing import Any

from kt_runtime.adapters import (
    AdapterTensors,
    AdapterVersion,
    VersionStore,
    VersionTable,
    as_version,
    check_adapter,
    check_adapter_name,
    content_hash,
    read_adapter,
)
from kt_runtime.errors import ConflictError, KtError, UnknownNameError
from kt_runtime.families import Family
from kt_runtime.resident.host import Host
from kt_runtime.wire.messages import AdapterInfo, VersionInfo

logger = logging.getLogger(__name__)

Done = Callable[[AdapterVersion | Exception], None]
"""Called once: with the version that the name means now (`lora_id` set), or with what went wrong."""


@dataclass
class _Operation:
    """`version.lora_id` is the fresh id. `is_rollback`: the table cuts back instead of appending."""

    name: str
    adapter: AdapterTensors
    version: AdapterVersion
    is_rollback: bool
    done: Done


class Publisher:
    """Nothing can be published before `start`.

    `moved(lora_id, error)` is called when the frontend has answered; whoever gets it must call `finish` with the same
    arguments on every rank.
    """

    def __init__(
        self,
        host: Host,
        family: Family,
        store: VersionStore,
        kept_versions: int,
        background: ThreadExecutor,
        moved: Callable[[str, Exception | None], None],
    ) -> None:
        self._host, self._family, self._store = host, family, store
        self._background, self._moved = background, moved
        self._salt = ""
        self._table = VersionTable(kept_versions)
        self._under_way: dict[str, _Operation] = {}
        self._waiting: dict[str, deque[_Operation]] = {}
        self._installed: set[str] = set()
        self._unwritten: dict[tuple[str, str], AdapterTensors] = {}
        self._ids_given = 0

    def publish(self, name: str, adapter: AdapterTensors, source: str, done: Done) -> None:
        """Begins to let `name` mean `adapter`, whose tensors must not change any more.

        Raises AdapterError when it can't be served and ConflictError without room for another one.
        """
        check_adapter_name(name)
        completed = as_version(adapter, self._family, self._host.config)
        check_adapter(completed, self._family, self._host.config, self._host.max_lora_rank, f"adapter {name!r}")
        version = AdapterVersion(
            content_hash(completed), time.time(), completed.rank, float(completed.alpha), source, self._fresh_id()
        )
        self._begin(_Operation(name, completed, version, False, done))

    def load(self, name: str, path: str, done: Done) -> None:
        """As `publish`, of the PEFT directory or GGUF file at `path`. Raises NotFoundError too."""
        check_adapter_name(name)
        adapter = read_adapter(path, self._family, self._host.config, self._host.max_lora_rank, self._host.model)
        for note in adapter.notes:
            logger.info("adapter %r from %s: %s", name, path, note)
        self.publish(name, adapter, path, done)

    def rollback(self, name: str, to: str | None, done: Done) -> None:
        """Begins to let `name` mean an earlier version. Raises UnknownNameError, ConflictError, AdapterError."""
        target = self._table.rollback_target(name, to)
        adapter = self._unwritten.get((name, target.hash))
        if adapter is None:
            adapter = self._store.load(name, target.hash)
        version = AdapterVersion(
            target.hash, target.created, target.rank, target.alpha, target.source, self._fresh_id()
        )
        self._begin(_Operation(name, adapter, version, True, done))

    def finish(self, lora_id: str, error: Exception | None) -> None:
        """The frontend has moved the name, or has not. Begins the next operation that waits for this name."""
        operation = self._under_way.pop(lora_id)
        try:
            if error is not None:
                self.drop(lora_id)
                operation.done(error)
            else:
                self._remember(operation)
                operation.done(operation.version)
        finally:
            self._next(operation.name)

    @property
    def is_waiting(self) -> bool:
        """True while the frontend has been asked and has not answered."""
        return bool(self._under_way)

    def drop(self, lora_id: str) -> None:
        """Frees the engine's copy. An unknown id is ignored."""
        self._installed.discard(lora_id)
        self._host.drop_adapter(lora_id)

    def forget(self, name: str) -> None:
        """`name` means nothing any more; its versions stay on disk. Raises UnknownNameError."""
        self._table.unload(name)
        self._background.submit(_logged, self._store.forget, name)

    def start(self, salt: str) -> None:
        """Serves again what the names meant when the server stopped; what can't be served is logged and left out.

        `salt` makes this process's ids unlike any other's; it is the same on every rank.
        """
        self._salt = salt
        self._store.clean()
        for name in self._store.names():
            try:
                served = self._store.served(name)
                self._table.restore(name, self._store.versions(name), served)
                current = self._table.current(name)
                version = AdapterVersion(
                    current.hash, current.created, current.rank, current.alpha, current.source, self._fresh_id()
                )
                adapter = self._store.load(name, current.hash)
                self._begin(_Operation(name, adapter, version, False, _log_restored(name)))
            except KtError as error:
                logger.warning("adapter %r of an earlier run is not served: %s", name, error)

    def adapters(self) -> list[AdapterInfo]:
        infos = []
        for name, current in self._table.current_versions().items():
            versions = [self._info(version) for version in reversed(self._table.history(name))]
            serves = current.lora_id in self._installed
            infos.append(AdapterInfo(name=name, current=current.hash if serves else None, versions=versions))
        return infos

    def _info(self, version: AdapterVersion) -> VersionInfo:
        return VersionInfo(
            version=version.hash,
            lora_id=version.lora_id if version.lora_id in self._installed else None,
            rank=version.rank,
            alpha=version.alpha,
            source=version.source,
            created_at=version.created,
        )

    def _fresh_id(self) -> str:
        assert self._salt
        self._ids_given += 1
        return hashlib.sha256(f"{self._salt}:{self._ids_given}".encode()).hexdigest()[:32]

    def _begin(self, operation: _Operation) -> None:
        if operation.name in self._waiting:
            self._waiting[operation.name].append(operation)
            return
        self._install(operation)
        self._waiting[operation.name] = deque()

    def _next(self, name: str) -> None:
        """Begins the operations that wait for `name`, until one is under way or none is left."""
        waiting = self._waiting[name]
        while waiting:
            operation = waiting.popleft()
            try:
                self._install(operation)
            except Exception as error:  # noqa: BLE001 - handed on: `done` answers it
                operation.done(error)
                continue
            return
        del self._waiting[name]

    def _install(self, operation: _Operation) -> None:
        lora_id = operation.version.lora_id
        assert lora_id is not None
        self._host.install_adapter(lora_id, operation.name, operation.version.hash, operation.adapter)
        self._installed.add(lora_id)
        self._under_way[lora_id] = operation

        def answered(error: Exception | None) -> None:
            self._moved(lora_id, error)

        self._host.move_name(operation.name, operation.version.hash, lora_id, answered)

    def _remember(self, operation: _Operation) -> None:
        name, version = operation.name, operation.version
        try:
            if not operation.is_rollback:
                self._table.publish(name, version)
            else:
                self._table.rollback(name, version.hash, version.lora_id)
        except (UnknownNameError, ConflictError):  # forgotten, or current by now, while this operation waited
            self._table.publish(name, version)
        served = self._table.served(name)
        self._unwritten[name, version.hash] = operation.adapter
        self._background.submit(_logged, self._write, name, version, operation.adapter, served)

    def _write(self, name: str, version: AdapterVersion, adapter: AdapterTensors, served: list[str]) -> None:
        self._store.save(name, adapter, created=version.created, source=version.source, base_model=self._host.model)
        self._store.point(name, served)
        self._unwritten.pop((name, version.hash), None)


def _log_restored(name: str) -> Done:
    def done(outcome: AdapterVersion | Exception) -> None:
        if isinstance(outcome, Exception):
            logger.warning("adapter %r of an earlier run is not served: %s", name, outcome)
        else:
            logger.info("adapter %r of an earlier run is served again, version %s", name, outcome.shown_hash)

    return done


def _logged(function: Callable[..., Any], *arguments: Any) -> None:
    """Runs `function` on the background thread; an error is logged: nobody waits for the result."""
    try:
        function(*arguments)
    except Exception:
        logger.exception("writing adapter versions failed")
