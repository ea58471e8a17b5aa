"""Writes published versions to disk on a background thread; versions that could not be written yet stay in memory.

For each name, this module holds the unwritten versions and the name's current meaning (`VersionStore.point`). One
thread writes both together, `DELAY_SECONDS` after the publication: during this delay the first requests for the version
arrive, and writing would compete with them for cores. It retries a full or failing disk with growing pauses, and
reports each unwritten version with the reason. The unwritten versions are bounded: beyond the bound only the current
version of each name is kept; others are dropped and reported as not stored.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass

from kt_runtime.adapters import AdapterTensors, AdapterVersion, VersionStore
from kt_runtime.adapters.tensors import give_way, without_openmp
from kt_runtime.errors import KtError

logger = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS = 1.0, 15.0
MAX_VERSIONS, MAX_BYTES = 32, 2 << 30
MAX_REASONS = 1024
CLOSING_SECONDS = 8.0
DELAY_SECONDS = 0.1
WRITING = "it is being written"
RANK_SECONDS, RANK_POLL_SECONDS = 5.0, 0.05
"""How long, and how often, a rank looks for a version that rank 0 is about to write."""


@dataclass(frozen=True)
class Unstored:
    """A version that is not on disk. `is_waiting`: it is kept in memory, and the write is retried."""

    name: str
    version: str
    reason: str
    is_waiting: bool


@dataclass(frozen=True)
class _Waiting:
    version: AdapterVersion
    adapter: AdapterTensors


class _Name:
    """One name's pending writes. `served`, `known`: as in VersionTable; `served` None: the name was unloaded."""

    def __init__(self) -> None:
        self.waiting: dict[str, _Waiting] = {}
        self.served: list[str] | None = None
        self.known: Collection[str] = ()
        self.is_pointed = True
        self.problem: str | None = None
        self.pause_s, self.not_before = FIRST_PAUSE_SECONDS, 0.0

    @property
    def is_done(self) -> bool:
        return self.is_pointed and not self.waiting

    @property
    def current(self) -> str | None:
        return self.served[-1] if self.served else None

    @property
    def unstored(self) -> list[str]:
        """Versions that a restart would lose, including the current version until `current.json` names it."""
        unnamed = self.current if not self.is_pointed else None
        return [*self.waiting, *([unnamed] if unnamed is not None and unnamed not in self.waiting else [])]


class Persistence:
    """Thread-safe. Only `flush` and `close` wait for the disk.

    `at_once`: it writes without the delay and at normal priority, since other servers wait for the files, unless `put`
    says that they have them. Without `is_writer` it neither writes nor keeps anything: another rank does.
    """

    def __init__(
        self,
        store: VersionStore,
        base_model: str,
        *,
        max_versions: int = MAX_VERSIONS,
        max_bytes: int = MAX_BYTES,
        at_once: bool = False,
        is_writer: bool = True,
    ) -> None:
        self._at_once, self._is_writer = at_once, is_writer
        self._store, self._base_model = store, base_model
        self._max_versions, self._max_bytes = max_versions, max_bytes
        self._names: dict[str, _Name] = {}
        self._given_up: dict[tuple[str, str], str] = {}
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kt-persist", daemon=True)
        self._thread.start()

    def put(
        self,
        name: str,
        version: AdapterVersion,
        adapter: AdapterTensors,
        served: list[str],
        known: Collection[str],
        *,
        is_elsewhere: bool = False,
    ) -> None:
        """`name` now means `version`. `served`, `known`: as in VersionTable; only versions in `known` are written.
        `is_elsewhere`: another server has its files, so nobody waits for this one's."""
        if not self._is_writer:
            return
        with self._changed:
            entry = self._names.setdefault(name, _Name())
            if entry.is_done and (is_elsewhere or not self._at_once):
                entry.not_before = time.monotonic() + DELAY_SECONDS
            entry.waiting.pop(version.hash, None)
            entry.waiting[version.hash] = _Waiting(version, adapter)
            entry.waiting = {item: waiting for item, waiting in entry.waiting.items() if item in known}
            entry.served, entry.known, entry.is_pointed = served, known, False
            self._given_up.pop((name, version.hash), None)
            self._keep_bounds()
            self._changed.notify_all()

    def forget(self, name: str) -> None:
        """`name` was unloaded and must stay so after a restart. Its waiting versions are written nevertheless."""
        if not self._is_writer:
            return
        with self._changed:
            entry = self._names.setdefault(name, _Name())
            entry.served, entry.is_pointed = None, False
            self._changed.notify_all()

    def load(self, name: str, version: str) -> AdapterTensors:
        """The version's tensors, from memory while they wait to be written, else from the disk. Raises as
        `VersionStore.load`. A rank that does not write waits for rank 0, which may hold the version in memory yet."""
        waiting = self.adapter(name, version)
        if waiting is not None:
            return waiting
        deadline = time.monotonic() + (0.0 if self._is_writer else RANK_SECONDS)
        while True:
            try:
                return self._store.load(name, version)
            except KtError:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(RANK_POLL_SECONDS)

    def adapter(self, name: str, version: str) -> AdapterTensors | None:
        """The version's tensors while they wait to be written."""
        with self._changed:
            waiting = self._names[name].waiting.get(version) if name in self._names else None
            return waiting.adapter if waiting is not None else None

    def reason(self, name: str, version: str) -> str | None:
        """Why a restart would lose this version; None if it would not."""
        with self._changed:
            entry = self._names.get(name)
            if entry is not None and version in entry.unstored:
                return entry.problem or WRITING
            return self._given_up.get((name, version))

    def unstored(self) -> list[Unstored]:
        with self._changed:
            waiting = [
                Unstored(name, version, entry.problem or WRITING, True)
                for name, entry in self._names.items()
                for version in entry.unstored
            ]
            return waiting + [Unstored(*place, reason, False) for place, reason in self._given_up.items()]

    def unforgotten(self) -> list[tuple[str, str]]:
        """(name, reason) of unloaded names that a restart would serve again."""
        with self._changed:
            return [
                (name, entry.problem)
                for name, entry in self._names.items()
                if entry.served is None and not entry.is_pointed and entry.problem is not None
            ]

    def flush(self, timeout_s: float) -> bool:
        """Waits until everything is written; False after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: all(entry.is_done for entry in self._names.values()), timeout_s)

    def close(self, timeout_s: float = CLOSING_SECONDS) -> None:
        """Retries every pending write once, and logs the versions that are still not written."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        for item in self.unstored():
            if item.is_waiting:
                logger.error("adapter %s, version %s is not stored: %s", item.name, item.version[:16], item.reason)

    # On the background thread.

    def _run(self) -> None:
        without_openmp()
        if not self._at_once:
            give_way()
        tried: set[str] = set()
        while True:
            with self._changed:
                name = self._next(tried)
                while name is None:
                    if self._closing:
                        return
                    self._changed.wait(self._seconds_to_next())
                    name = self._next(tried)
                if self._closing:
                    tried.add(name)
            self._write(name)

    def _next(self, tried: Collection[str]) -> str | None:
        """A name whose write is due. When closing, every name is due once, whatever its pause."""
        now = time.monotonic()
        for name, entry in self._names.items():
            if not entry.is_done and (name not in tried if self._closing else now >= entry.not_before):
                return name
        return None

    def _seconds_to_next(self) -> float | None:
        times = [entry.not_before for entry in self._names.values() if not entry.is_done]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _write(self, name: str) -> None:
        with self._changed:
            entry = self._names[name]
            served, known, waiting = entry.served, entry.known, list(entry.waiting.values())
        # The current version is written first: a restart needs it, and the disk may not have room for all.
        waiting.sort(key=lambda item: item.version.hash != (served[-1] if served else None))
        try:
            if not served:  # first, since this needs no disk space and so succeeds even on a full disk
                self._store.forget(name)
                self._is_forgotten(name)
            for item in waiting:
                self._save(name, item)
                if served and item.version.hash == served[-1]:
                    self._store.point(name, served, known)
            if served:
                self._store.point(name, served, known)
        except OSError as error:
            self._postpone(name, f"{error.strerror or error} (tried again)", error)
        except Exception as error:  # noqa: BLE001 - reported, not retried: a retry would fail again
            self._give_up(name, served, waiting, error)
        else:
            self._is_written(name, served)

    def _save(self, name: str, item: _Waiting) -> None:
        version = item.version
        self._store.save(
            name,
            item.adapter,
            created=version.created,
            source=version.source,
            base_model=self._base_model,
            version_hash=version.hash,
        )
        with self._changed:
            entry = self._names[name]
            if entry.waiting.get(version.hash) is item:
                del entry.waiting[version.hash]
            self._given_up.pop((name, version.hash), None)

    def _is_forgotten(self, name: str) -> None:
        with self._changed:
            if self._names[name].served is None:  # the name was not published again meanwhile
                self._names[name].is_pointed = True

    def _is_written(self, name: str, served: list[str] | None) -> None:
        with self._changed:
            entry = self._names[name]
            if entry.served == served:
                entry.is_pointed = True
            if entry.problem is not None:
                logger.warning("adapter %s is stored after all", name)
            entry.problem, entry.pause_s, entry.not_before = None, FIRST_PAUSE_SECONDS, 0.0
            if entry.is_done:
                del self._names[name]
            self._changed.notify_all()

    def _postpone(self, name: str, problem: str, error: OSError) -> None:
        with self._changed:
            entry = self._names[name]
            if entry.problem != problem:
                state = "unloaded, but not forgotten on disk" if entry.served is None else "served, but not stored"
                logger.warning("adapter %s is %s, and tried again: %s", name, state, error)
            entry.problem = problem
            entry.not_before = time.monotonic() + entry.pause_s
            entry.pause_s = min(2 * entry.pause_s, LAST_PAUSE_SECONDS)
            self._changed.notify_all()

    def _give_up(self, name: str, served: list[str] | None, waiting: list[_Waiting], error: Exception) -> None:
        details = None if isinstance(error, KtError) else error
        logger.error("adapter %s is served, but not stored: %s", name, error, exc_info=details)
        with self._changed:
            entry = self._names[name]
            tried = {item.version.hash for item in waiting} | {served[-1] if served else ""}
            for version in entry.unstored:
                if version in tried:
                    self._report(name, version, f"{type(error).__name__}: {error}")
            if entry.served == served:
                entry.is_pointed = True
            if entry.is_done:
                del self._names[name]
            self._changed.notify_all()

    # The caller holds the lock.

    def _keep_bounds(self) -> None:
        """Drops versions that are not current, those of unloaded names first, then the oldest."""
        waiting = [(name, item) for name, entry in self._names.items() for item in entry.waiting.values()]
        num_bytes = sum(item.adapter.num_bytes for _, item in waiting)
        spare = [(name, item) for name, item in waiting if item.version.hash != self._names[name].current]
        spare.sort(key=lambda pair: (self._names[pair[0]].served is not None, pair[1].version.created))
        count = len(waiting)
        for name, item in spare:
            if count <= self._max_versions and num_bytes <= self._max_bytes:
                return
            why = self._names[name].problem or "the disk is slower than publications come"
            self._report(name, item.version.hash, f"{count} versions, {num_bytes} bytes, waited to be written: {why}")
            count, num_bytes = count - 1, num_bytes - item.adapter.num_bytes

    def _report(self, name: str, version: str, reason: str) -> None:
        self._names[name].waiting.pop(version, None)
        self._given_up[name, version] = reason
        while len(self._given_up) > MAX_REASONS:
            del self._given_up[next(iter(self._given_up))]
