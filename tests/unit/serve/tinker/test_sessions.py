"""Clients' sessions: bounded in number, and ended after silence."""

from __future__ import annotations

import pytest

from kt_runtime.errors import ConflictError, NotFoundError
from kt_runtime.serve.tinker.sessions import ClientSessions


def test_a_repeated_attempt_gets_the_same_session_while_it_is_open() -> None:
    sessions = ClientSessions(lost_after_s=10)
    first = sessions.create("try-1")
    assert sessions.create("try-1") == first
    assert sessions.create(None) != first
    sessions.end(first)
    assert sessions.create("try-1") != first


def test_a_silent_client_is_lost_and_a_heartbeat_keeps_it() -> None:
    now = [0.0]
    sessions = ClientSessions(lost_after_s=10, now=lambda: now[0])
    quiet, alive = sessions.create(None), sessions.create(None)
    now[0] = 8.0
    sessions.touch(alive)
    now[0] = 12.0
    assert sessions.lost() == [quiet]
    assert sessions.end(quiet) and not sessions.end(quiet)
    with pytest.raises(NotFoundError, match="silent for 10 s"):
        sessions.touch(quiet)


def test_too_many_sessions_are_refused() -> None:
    sessions = ClientSessions(lost_after_s=10, most=2)
    sessions.create(None)
    last = sessions.create(None)
    with pytest.raises(ConflictError, match="2 clients have a session, which is the limit"):
        sessions.create(None)
    sessions.end(last)
    sessions.create(None)
