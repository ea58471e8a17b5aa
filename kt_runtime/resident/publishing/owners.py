"""Ownership of adapter names: the first training session that claims a name owns it until the session ends.

Two publishers of one name would silently undo each other's versions. So another session, or a load of a directory under
the name, needs `take_over`. A session whose name was taken over or unloaded gets an error at its next publication. The
same holds if the session's first publication of the name was in progress at that time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from kt_runtime.errors import ConflictError
from kt_runtime.resident.training.session import SessionId

_HOW_TO_TAKE_OVER = "set take_over (publish_take_over in a recipe, --take-over of adapter load)"


@dataclass(frozen=True)
class Owner:
    """`since`: Unix time, seconds."""

    session: SessionId
    since: float


class Owners:
    """`clock`: Unix time, seconds. Only sessions between `begin` and `end` can own names."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._owners: dict[str, Owner] = {}
        self._live: set[str] = set()
        self._lost: dict[tuple[str, str], str] = {}

    def begin(self, session: SessionId) -> None:
        self._live.add(session.key)

    def end(self, session: SessionId) -> None:
        """The session was closed: releases its names."""
        self._live.discard(session.key)
        self._owners = {name: owner for name, owner in self._owners.items() if owner.session != session}
        self._lost = {place: why for place, why in self._lost.items() if place[0] != session.key}

    def of(self, name: str) -> Owner | None:
        return self._owners.get(name)

    def names_of(self, session: SessionId) -> list[str]:
        return sorted(name for name, owner in self._owners.items() if owner.session == session)

    def check(self, name: str, session: SessionId | None, *, take_over: bool) -> None:
        """Raises ConflictError if `session` (None: no session) may not publish `name` without `take_over`."""
        if take_over:
            return
        owner = self._owners.get(name)
        if owner is not None and owner.session != session:
            raise ConflictError(
                f"adapter {name!r} is published by session {owner.session.name!r} since {_shown(owner.since)}; "
                f"choose another name, or {_HOW_TO_TAKE_OVER}: that session's next publication of it is an error then"
            )
        why = self._lost.get((session.key, name)) if session is not None else None
        if why is not None and session is not None:
            raise ConflictError(
                f"adapter {name!r} {why}, after session {session.name!r} had published it or begun to; to publish "
                f"it again, {_HOW_TO_TAKE_OVER}"
            )

    def permits(self, name: str, session: SessionId | None, *, take_over: bool) -> bool:
        """Whether `check` raises nothing."""
        try:
            self.check(name, session, take_over=take_over)
        except ConflictError:
            return False
        return True

    def claim(self, name: str, session: SessionId | None) -> None:
        """Makes `session` the owner of `name`. None, or a session that has ended: the name has no owner."""
        owner = self._owners.get(name)
        if owner is not None and owner.session == session:
            return
        by = f"session {session.name!r}" if session is not None else "loading another adapter under the name"
        self.lose(name, f"was taken over by {by}")
        if session is not None and session.key in self._live:
            self._owners[name] = Owner(session, self._clock())
            self._lost.pop((session.key, name), None)

    def lose(self, name: str, how: str) -> None:
        """The owner, if there is one, loses the name. `how`: the reason, as a predicate after "adapter NAME"."""
        owner = self._owners.pop(name, None)
        if owner is not None:
            self.refuse(name, owner.session, how)

    def refuse(self, name: str, session: SessionId, how: str) -> None:
        """From now on `session` needs `take_over` to publish the name. No effect for sessions that have ended."""
        if session.key in self._live:
            self._lost[session.key, name] = f"{how} at {_shown(self._clock())}"


def _shown(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).isoformat(sep=" ", timespec="seconds")
