"""Clients' sessions. The session of a client that sends no request for too long, not even a heartbeat, ends."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable

from kt_runtime.errors import ConflictError, NotFoundError

MAX_SESSIONS = 256
HEARTBEAT_SECONDS = 10.0
"""Clients send one this often."""
MAX_REMEMBERED = 1024


class ClientSessions:
    """`lost_after_s`: how long a client may be silent."""

    def __init__(
        self, *, lost_after_s: float, most: int = MAX_SESSIONS, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._lost_after_s, self._most, self._now = lost_after_s, most, now
        self._seen: dict[str, float] = {}
        self._by_attempt: OrderedDict[str, str] = OrderedDict()

    def create(self, attempt: str | None) -> str:
        """A session's id. `attempt`: the client's idempotency key; a repeated attempt gets the same session.

        Raises ConflictError if too many are open.
        """
        known = self._by_attempt.get(attempt or "")
        if known in self._seen:
            return known
        if len(self._seen) >= self._most:
            raise ConflictError(
                f"{len(self._seen)} clients have a session, which is the limit; close one, or wait until a client "
                f"that ended has been silent for {self._lost_after_s:g} s"
            )
        session = f"s{secrets.token_hex(6)}"
        self._seen[session] = self._now()
        if attempt:
            self._by_attempt[attempt] = session
            while len(self._by_attempt) > MAX_REMEMBERED:
                self._by_attempt.popitem(last=False)
        return session

    def touch(self, session: str) -> None:
        """The client is alive. Raises NotFoundError for a session that has ended."""
        if session not in self._seen:
            raise NotFoundError(
                f"session {session[:100]!r} is not open: it was finished, its client was silent for "
                f"{self._lost_after_s:g} s, or the server was restarted"
            )
        self._seen[session] = self._now()

    def is_open(self, session: str) -> bool:
        return session in self._seen

    def end(self, session: str) -> bool:
        """Whether the session was open."""
        return self._seen.pop(session, None) is not None

    def lost(self) -> list[str]:
        """Open sessions whose clients are silent for too long."""
        before = self._now() - self._lost_after_s
        return [session for session, seen in self._seen.items() if seen < before]

    def all(self) -> list[str]:
        return list(self._seen)
