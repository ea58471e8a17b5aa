"""The replicas of a registry, as this server sees them: alive while their heartbeats count up.

Only this server's monotonic clock measures silence, so replicas whose clocks are apart are as alive as the others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kt_runtime.registry import Heartbeat

FORGOTTEN_SECONDS = 3600.0
"""A replica that was silent for so long is removed from the registry."""


@dataclass(frozen=True)
class Peer:
    """`silent_s`: seconds since its heartbeat changed. `clock_offset_s`: of its clock from this server's then."""

    heartbeat: Heartbeat
    silent_s: float
    clock_offset_s: float


class Peers:
    """Thread-safe. `clock`: monotonic seconds, `wall`: Unix time."""

    def __init__(self, this: str, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self._this, self._clock, self._wall = this, clock, wall
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[Heartbeat, float, float]] = {}  # the heartbeat, since when, the clock's offset

    def look(self, found: Mapping[str, Heartbeat]) -> list[str]:
        """Takes the heartbeats of now; returns the replicas to remove."""
        now, wall = self._clock(), self._wall()
        with self._lock:
            seen = {}
            for replica, heartbeat in found.items():
                before = self._seen.get(replica)
                if before is not None and before[0] == heartbeat:
                    seen[replica] = before
                else:
                    seen[replica] = (heartbeat, now, heartbeat.written_at - wall)
            self._seen = seen
            return [
                replica
                for replica, (_, since, _) in seen.items()
                if replica != self._this and now - since > FORGOTTEN_SECONDS
            ]

    def latest(self) -> list[Peer]:
        """The replicas' latest heartbeats, sorted by name."""
        now = self._clock()
        with self._lock:
            return [Peer(beat, now - since, offset) for _, (beat, since, offset) in sorted(self._seen.items())]
