"""Keeps this server's adapter names and a registry's in step, on threads of its own.

One thread looks at the registry every `Place.poll_s` and decides; up to `MAX_JOBS` others carry versions there and
back, one job of a name at a time. Whatever the registry does, requests are served from what is loaded here.

- A name that moves or is unloaded *here* is published: its version's files, then the manifest with the next revision.
  Until that is done, this server keeps its own meaning of the name.
- Otherwise a name means what its newest revision says. A revision that is older than one seen before is never taken,
  also after a restart.
- A move that this module asked for is known by its version's hash; every other move is the server's own.

What a restart must know is in `state.json`. A change of an earlier run that never reached the registry is published if
no replica has published the name since; otherwise the registry's revision is taken, and the log says so.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kt_runtime.errors import ConflictError, KtError, RuntimeFault, UnknownNameError
from kt_runtime.files import remove_unfinished
from kt_runtime.registry import Heartbeat, Manifest, Registry, ServedRevision
from kt_runtime.serve.registry.entry import LAST_PAUSE_SECONDS, Entry
from kt_runtime.serve.registry.here import Here
from kt_runtime.serve.registry.peers import Peers
from kt_runtime.serve.registry.report import RegistryReport, name_report, replica_report
from kt_runtime.serve.registry.state import Pending, State, StateFile

logger = logging.getLogger(__name__)

MAX_JOBS = 4
STORING_SECONDS = 0.01
"""Pause between two looks for a version that the resident is writing."""
LEAST_PAUSE_SECONDS = 0.03
"""Least pause between two looks at the registry."""
PATIENCE_SECONDS = 2.0
"""After so long, the report says why a version is not on disk."""
RETRY_SECONDS = 1.0
"""Pause between two looks at a registry that fails."""
BEAT_SECONDS = 2.0
CLOSING_SECONDS = 3.0
LONGEST_SHARE = 0.2
"""Largest share of the time that looking may take: a slow registry is looked at less often."""


@dataclass(frozen=True)
class About:
    """Facts for people: `place` of the registry, `url` of this server, `model`. `shape`: as in `Base`."""

    place: str
    url: str
    model: str
    shape: dict[str, int | str] = field(default_factory=dict)


class Replica:
    """A `serve.http.names.Watcher`: `moved` and `removed` are called in the event loop and do not block.

    `state`: what `file` said when the server started. `clock`: monotonic seconds; `wall`: Unix time, for people only.
    """

    def __init__(
        self,
        registry: Registry,
        here: Here,
        file: StateFile,
        state: State,
        about: About,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._registry, self._here, self._file, self._about = registry, here, file, about
        self._clock, self._wall = clock, wall
        self._lock = threading.Lock()
        self._names: dict[str, Entry] = {}
        self._earlier = state
        self._fingerprint = self._id = ""
        self._problem: str | None = None
        self._turn_began: float | None = None
        self._num_jobs = self._num_beats = 0
        self._is_changed = self._caught_up = self._closing = False
        self._beat_at = self._looked_s = 0.0
        self._peers = Peers(registry.replica, clock, wall)
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kt-registry", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Signs off, if the registry answers in time. Jobs in progress end with the process."""
        self._closing = True
        self._wake.set()
        self._thread.join(CLOSING_SECONDS)

    # What the server tells.

    def moved(self, name: str, version: str) -> None:
        self._changed_here(name, version)

    def removed(self, name: str) -> None:
        self._changed_here(name, None)

    def _changed_here(self, name: str, version: str | None) -> None:
        with self._lock:
            entry = self._names.setdefault(name, Entry())
            entry.here = version
            if not self._fingerprint:  # the server restores an earlier run's names; `_start_from` compares them
                return
            newest = entry.newest
            is_ours = (version or "") in (entry.following, entry.may_follow)
            entry.may_follow = None
            is_there = entry.pending is None and newest is not None and newest.version == version
            if is_ours or is_there:
                return
            entry.pending, entry.pending_since = Pending(version=version, after=entry.seen), self._clock()
            entry.retry_now()
            self._is_changed = True
        self._wake.set()

    @property
    def is_catching_up(self) -> bool:
        """Whether names of the registry have not been tried since the start. False where the registry does not answer,
        or refuses this server: it serves what it has."""
        with self._lock:
            hangs = self._turn_began is not None and self._clock() - self._turn_began > LAST_PAUSE_SECONDS
            return not self._caught_up and self._problem is None and not hangs

    # The thread that looks.

    def _run(self) -> None:
        while not self._closing:
            with self._lock:
                self._turn_began = self._clock()
            try:
                self._turn()
                self._tell(None)
            except (OSError, KtError) as error:
                self._tell(str(error) or type(error).__name__)
            except Exception as error:  # the thread must outlive a bug
                logger.exception("registry: unexpected error; it is tried again")
                self._tell(f"unexpected {type(error).__name__}: {error}")
            self._save()
            with self._lock:
                self._turn_began = None
            self._wake.wait(self._pause_s())
            self._wake.clear()
        self._save()
        if self._id:
            with contextlib.suppress(OSError):  # then it is silent, and is forgotten after a while
                self._registry.leave(self._registry.replica)

    def _pause_s(self) -> float:
        with self._lock:
            if self._problem is not None:
                return RETRY_SECONDS
            waiting = [each.not_before for each in self._names.values() if each.pending and not each.is_busy]
        looks_s = min(LAST_PAUSE_SECONDS, max(self._registry.place.poll_s, self._looked_s / LONGEST_SHARE))
        return max(LEAST_PAUSE_SECONDS, min([looks_s, *(at - self._clock() for at in waiting)]))

    def _tell(self, problem: str | None) -> None:
        with self._lock:
            before, self._problem = self._problem, problem
        if problem is not None and problem != before:
            logger.error("registry %s: %s; serving goes on", self._about.place, problem)
        elif problem is None and before is not None:
            logger.warning("registry %s: works again", self._about.place)

    def _turn(self) -> None:
        if not self._fingerprint and not self._start_from(self._earlier):
            return
        if not self._id:
            self._join()
        base = self._registry.base()
        if base is None or base.registry != self._id:
            found = "base.json is missing" if base is None else f"its id is {base.registry[:8]}"
            raise ConflictError(
                f"is not the registry that this server joined ({self._id[:8]}): {found}. Is a disk not mounted? A "
                "restart of the server joins the registry that is there"
            )
        self._look()
        for name in self._due():
            threading.Thread(target=self._work, args=(name,), name=f"kt-registry-{name[:40]}", daemon=True).start()
        self._save()
        self._beat()

    def _start_from(self, earlier: State) -> bool:
        """False while the resident starts, or hashes the weights."""
        try:
            fingerprint = self._here.fingerprint()
        except RuntimeFault:
            return False
        if not fingerprint:
            return False
        with self._lock:
            for name in {*self._names, *earlier.names}:
                self._names.setdefault(name, Entry()).restored(earlier.names.get(name))
            self._fingerprint = fingerprint
        remove_unfinished(self._file.directory)
        return True

    def _join(self) -> None:
        """A server that has joined a registry does not begin another one in its place, which may be a mount's point."""
        if self._earlier.registry and self._registry.base() is None:
            raise ConflictError(
                f"base.json is missing, and this server joined registry {self._earlier.registry[:8]} here before. Is a "
                f"disk not mounted? To begin a new registry, remove {self._file.path}"
            )
        base = self._registry.join(self._fingerprint, self._about.model, self._about.shape)
        self._registry.clear_unfinished()
        with self._lock:
            if base.registry != self._earlier.registry:
                for entry in self._names.values():
                    entry.of_another_registry()
            self._id, self._is_changed = base.registry, True
        logger.info("registry %s: joined as replica %s", self._about.place, self._registry.replica)

    def _look(self) -> None:
        """Reads the manifests of new revisions."""
        began = self._clock()
        found = self._registry.revisions()
        self._looked_s = self._clock() - began
        with self._lock:
            for name in found:
                self._names.setdefault(name, Entry())
            known = {name: (entry.seen, entry.head) for name, entry in self._names.items()}
        for name, (seen, head) in known.items():
            newest, problem, manifest = found.get(name, [0])[-1], None, None
            if newest < seen:
                what = f"revision {newest} is the newest" if newest else "there is no revision of it"
                problem = f"{what} in the registry, and revision {seen} was seen before: the name stays"
            elif newest and (head is None or head.revision < newest):
                try:
                    manifest = self._registry.manifest(name, newest)
                except (OSError, KtError) as error:
                    problem = f"revision {newest} can't be read: {error}"
            with self._lock:
                entry = self._names[name]
                if manifest is not None and entry.take(manifest):
                    self._is_changed = True
                if problem != entry.reading_problem:
                    entry.reading_problem, self._is_changed = problem, True
                    if problem is not None:
                        logger.error("registry: adapter %r: %s", name, problem)

    def _due(self) -> list[str]:
        """Names for which a job begins now."""
        due, now = [], self._clock()
        with self._lock:
            for name, entry in self._names.items():
                if not entry.is_busy:
                    self._drop_old(name, entry)
                newest = entry.newest
                if entry.pending is None and (newest is None or newest.version == entry.here):
                    self._is_changed = entry.settle() or self._is_changed
                    entry.is_tried = True
                elif not entry.is_busy and now >= entry.not_before and self._num_jobs < MAX_JOBS:
                    entry.is_busy, self._num_jobs = True, self._num_jobs + 1
                    due.append(name)
            if all(entry.is_tried or entry.pending is not None for entry in self._names.values()):
                self._caught_up = True
        return due

    def _drop_old(self, name: str, entry: Entry) -> None:
        pending = entry.pending
        if pending is None or not pending.is_old or entry.seen <= pending.after:
            return
        entry.pending, self._is_changed = None, True
        if entry.newest is not None and entry.newest.version != entry.here:
            what = f"version {pending.version[:16]}" if pending.version else "its unloading"
            logger.error(
                "adapter %r: %s of this server's earlier run never reached the registry, where revision %d has been "
                "published since; that one is served",
                name,
                what,
                entry.seen,
            )

    # Jobs, on threads of their own.

    def _work(self, name: str) -> None:
        with self._lock:
            entry = self._names[name]
            pending, head = entry.pending, entry.head
            if pending is None and head is not None:
                entry.following = head.version or ""
        problem = None
        try:
            if pending is not None:
                self._publish(name, entry, pending)
            elif head is not None:
                self._follow(head)
        except (OSError, KtError) as error:
            problem = str(error) or type(error).__name__
            if pending is None and isinstance(error, RuntimeFault):
                with self._lock:
                    entry.may_follow = entry.following
        except Exception as error:
            logger.exception("registry: adapter %r: unexpected error; it is tried again", name)
            problem = f"unexpected {type(error).__name__}: {error}"
        with self._lock:
            self._ended(name, entry, problem)
        self._wake.set()

    def _ended(self, name: str, entry: Entry, problem: str | None) -> None:
        entry.is_busy, entry.following, entry.is_tried = False, None, True
        self._num_jobs -= 1
        if problem is None:
            self._is_changed = True
            entry.settle()
            entry.retry_now()
            return
        entry.not_before = self._clock() + entry.pause_s
        entry.pause_s = min(2 * entry.pause_s, LAST_PAUSE_SECONDS)
        if problem != entry.problem:
            entry.problem, self._is_changed = problem, True
            logger.warning("registry: adapter %r: %s; it is tried again", name, problem)

    def _publish(self, name: str, entry: Entry, pending: Pending) -> None:
        with self._lock:
            seen, since = entry.seen, entry.pending_since
        manifest = None
        if pending.version is None:
            if seen:  # otherwise no replica knows the name
                manifest = self._registry.unload(name, base=self._fingerprint, after=seen)
        elif (directory := self._stored_in_time(name, entry, pending, since)) is not None:
            source = self._about.url
            manifest = self._registry.publish(
                name, pending.version, directory, base=self._fingerprint, source=source, after=seen
            )
        elif entry.pending is not pending:  # a newer change is to be published
            return
        elif (why := self._here.why_not_stored(name, pending.version)) is not None:
            raise RuntimeFault(f"version {pending.version[:16]} is not published, since it is not stored here: {why}")
        else:
            logger.warning("registry: adapter %r: version %s is gone, unpublished", name, pending.version[:16])
        with self._lock:
            if entry.pending is pending:
                entry.pending = None
            if manifest is not None:
                entry.take(manifest)
        if manifest is not None:
            logger.info("registry: revision %d of adapter %r is published", manifest.revision, name)

    def _stored_in_time(self, name: str, entry: Entry, pending: Pending, since: float) -> Path | None:
        """The directory of the version, which the resident writes soon after the name has moved."""
        assert pending.version is not None
        while (found := self._here.stored(name, pending.version)) is None:
            if self._clock() - since > PATIENCE_SECONDS or entry.pending is not pending or self._closing:
                return None
            time.sleep(STORING_SECONDS)
        return found

    def _follow(self, manifest: Manifest) -> None:
        name, version = manifest.name, manifest.version
        if manifest.base != self._fingerprint:
            raise ConflictError(
                f"revision {manifest.revision} is for weights with the fingerprint {manifest.base}, and this server "
                f"has {self._fingerprint}"
            )
        if version is None:
            with contextlib.suppress(UnknownNameError):
                self._here.unload(name)
            return
        source = f"registry: revision {manifest.revision} of replica {manifest.replica}"
        stored = self._here.stored(name, version)
        if stored is not None:
            try:
                self._here.follow(name, stored, version, source)
                return
            except KtError as error:
                logger.warning("registry: adapter %r: %s; it is fetched again", name, error)
        pulled = self._registry.pull(manifest, self._file.directory)
        try:
            self._here.follow(name, pulled, version, source)
        finally:
            shutil.rmtree(pulled, ignore_errors=True)
        logger.info("registry: adapter %r means revision %d now", name, manifest.revision)

    # State, heartbeats, the report.

    def _save(self) -> None:
        with self._lock:
            if not self._is_changed:
                return
            self._is_changed, self._beat_at = False, 0.0
            names = {name: entry.state() for name, entry in self._names.items()}
        known = self._id or self._earlier.registry
        try:
            self._file.write(State(replica=self._registry.replica, registry=known, names=names))
        except OSError as error:  # a restart then takes what the registry has
            logger.warning("%s: can't be written: %s", self._file.path, error.strerror or error)

    def _beat(self) -> None:
        now = self._clock()
        if now < self._beat_at:
            return
        self._beat_at, self._num_beats = now + BEAT_SECONDS, self._num_beats + 1
        with self._lock:
            names = {
                name: ServedRevision(revision=entry.settled, version=entry.here, problem=entry.says)
                for name, entry in self._names.items()
            }
        self._registry.beat(
            Heartbeat(
                replica=self._registry.replica,
                beat=self._num_beats,
                url=self._about.url,
                written_at=self._wall(),
                names=names,
            )
        )
        for gone in self._peers.look(self._registry.replicas()):
            self._registry.leave(gone)

    def report(self) -> RegistryReport:
        """Never waits for the registry."""
        peers, this = self._peers.latest(), self._registry.replica
        with self._lock:
            began = self._turn_began
            newest = {name: entry.seen for name, entry in self._names.items()}
            return RegistryReport(
                place=self._about.place,
                replica=this,
                registry=self._id,
                problem=self._problem,
                waiting_s=0.0 if began is None else self._clock() - began,
                caught_up=self._caught_up,
                names=[name_report(name, entry, this, peers) for name, entry in sorted(self._names.items())],
                replicas=[replica_report(peer, this, newest) for peer in peers],
            )
