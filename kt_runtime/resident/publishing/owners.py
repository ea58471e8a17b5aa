"""Who publishes an adapter's name: the training session that said so first, until it ends.

Another session asks (`take_over`), and so does loading a directory under the name: two publishers of one name would
undo each other's versions silently. A session whose name was taken over or unloaded is told at its next publication;
so is one whose first publication of the name was under way then.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from kt_runtime.errors import ConflictError

_ASKING = "say take_over (publish_take_over in a recipe, --take-over of adapter load)"


@dataclass(frozen=True)
class SessionId:
    """`key` is the session's own alone; `name` is what its client calls it, and another session may be called later."""

    key: str
    name: str


@dataclass(frozen=True)
class Owner:
    """`since`: Unix time, seconds."""

    session: SessionId
    since: float


class Owners:
    """`clock`: Unix time, seconds. Sessions that have not begun here own nothing."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._owners: dict[str, Owner] = {}
        self._live: set[str] = set()
        self._lost: dict[tuple[str, str], str] = {}

    def begin(self, session: SessionId) -> None:
        self._live.add(session.key)

    def end(self, session: SessionId) -> None:
        """The session was closed: its names are free."""
        self._live.discard(session.key)
        self._owners = {name: owner for name, owner in self._owners.items() if owner.session != session}
        self._lost = {place: why for place, why in self._lost.items() if place[0] != session.key}

    def of(self, name: str) -> Owner | None:
        return self._owners.get(name)

    def names_of(self, session: SessionId) -> list[str]:
        return sorted(name for name, owner in self._owners.items() if owner.session == session)

    def check(self, name: str, session: SessionId | None, *, take_over: bool) -> None:
        """Raises ConflictError if `session` (None: no session) may not give `name` a version without asking."""
        if take_over:
            return
        owner = self._owners.get(name)
        if owner is not None and owner.session != session:
            raise ConflictError(
                f"adapter {name!r} is published by session {owner.session.name!r} since {_shown(owner.since)}; "
                f"choose another name, or {_ASKING}: that session's next publication of it is an error then"
            )
        why = self._lost.get((session.key, name)) if session is not None else None
        if why is not None and session is not None:
            raise ConflictError(
                f"adapter {name!r} {why}, after session {session.name!r} had published it or begun to; to publish "
                f"it again, {_ASKING}"
            )

    def permits(self, name: str, session: SessionId | None, *, take_over: bool) -> bool:
        """Whether `check` raises nothing."""
        try:
            self.check(name, session, take_over=take_over)
        except ConflictError:
            return False
        return True

    def claim(self, name: str, session: SessionId | None) -> None:
        """`name` is published by `session` from now on; None, or a session that has ended: by nobody."""
        owner = self._owners.get(name)
        if owner is not None and owner.session == session:
            return
        by = f"session {session.name!r}" if session is not None else "loading another adapter under the name"
        self.lose(name, f"was taken over by {by}")
        if session is not None and session.key in self._live:
            self._owners[name] = Owner(session, self._clock())
            self._lost.pop((session.key, name), None)

    def lose(self, name: str, how: str) -> None:
        """The owner, if there is one, loses the name; `how` goes on from "adapter NAME"."""
        owner = self._owners.pop(name, None)
        if owner is not None:
            self.refuse(name, owner.session, how)

    def refuse(self, name: str, session: SessionId, how: str) -> None:
        """`session` must ask before it publishes the name (again). Not for sessions that have ended."""
        if session.key in self._live:
            self._lost[session.key, name] = f"{how} at {_shown(self._clock())}"


def _shown(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).isoformat(sep=" ", timespec="seconds")
