"""One name, on this server and in the registry."""

from __future__ import annotations

from dataclasses import dataclass

from kt_runtime.registry import Manifest
from kt_runtime.serve.registry.state import NameState, Pending

FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS = 0.5, 15.0


@dataclass
class Entry:
    """`here`: the version that requests get, None: none. `head`: the newest revision that was read; `seen`: the highest
    that was ever seen. `settled`: the newest revision that was in effect here, and `agreed` what it says.

    `pending`: a change of this server's that is not in the registry yet, `pending_since` by the monotonic clock.
    `following`: the version that a job moves the name to, "" while it unloads the name. `may_follow`: the same of a job
    that failed without an answer, and may take effect later. `is_tried`: the head has been
    looked at, and followed or not. `problem`: of the last job; `reading_problem`: of the last look at the registry.
    """

    here: str | None = None
    head: Manifest | None = None
    seen: int = 0
    settled: int = 0
    agreed: str | None = None
    pending: Pending | None = None
    pending_since: float = 0.0
    following: str | None = None
    may_follow: str | None = None
    is_busy: bool = False
    is_tried: bool = False
    problem: str | None = None
    reading_problem: str | None = None
    pause_s: float = FIRST_PAUSE_SECONDS
    not_before: float = 0.0

    @property
    def newest(self) -> Manifest | None:
        """What the name means in the registry; None if an older revision was put in the newest one's place."""
        return self.head if self.head is not None and self.head.revision >= self.seen else None

    @property
    def says(self) -> str | None:
        return self.problem or self.reading_problem

    def restored(self, known: NameState | None) -> None:
        """Compares what the server serves after its start with what an earlier run knew."""
        if known is not None:
            self.seen, self.settled, self.agreed = known.seen, known.settled, known.version
            was_pending = known.pending
            if was_pending is not None and was_pending.version == self.here:
                self.pending = Pending(version=self.here, after=was_pending.after, is_old=True)
                return
        if self.here is not None and self.here != self.agreed:
            self.pending = Pending(version=self.here, after=self.settled, is_old=True)

    def of_another_registry(self) -> None:
        """The registry was made anew: none of its revisions has been seen."""
        self.head, self.seen, self.settled, self.agreed = None, 0, 0, None
        if self.pending is not None:
            self.pending = Pending(version=self.pending.version, after=0, is_old=self.pending.is_old)
        elif self.here is not None:
            self.pending = Pending(version=self.here, after=0, is_old=True)

    def take(self, manifest: Manifest) -> bool:
        """Whether `manifest` is newer than what was known."""
        if manifest.revision <= (self.head.revision if self.head else 0) or manifest.revision < self.seen:
            return False
        self.head, self.seen = manifest, manifest.revision
        self.retry_now()
        self.is_tried = False
        return True

    def settle(self) -> bool:
        """Notes that server and registry agree. Whether that is news."""
        newest = self.newest
        if newest is None or newest.version != self.here or self.settled == newest.revision:
            return False
        self.settled, self.agreed = newest.revision, newest.version
        return True

    def retry_now(self) -> None:
        self.problem, self.not_before, self.pause_s = None, 0.0, FIRST_PAUSE_SECONDS

    def state(self) -> NameState:
        return NameState(seen=self.seen, settled=self.settled, version=self.agreed, pending=self.pending)
