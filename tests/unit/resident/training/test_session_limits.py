from __future__ import annotations

import pytest

from kt_runtime.errors import ConflictError
from kt_runtime.resident.training.session_limits import SessionLimits
from kt_runtime.wire.status import SessionInfo


def info(name: str, num_bytes: int = 10**9, idle_s: float = 0.0) -> SessionInfo:
    return SessionInfo(
        session=name, rank=4, alpha=8.0, step=3, modules=[], num_parameters=1, num_bytes=num_bytes, idle_s=idle_s
    )


def test_the_number_of_sessions_is_limited_and_the_longest_idle_are_named_first() -> None:
    limits = SessionLimits(max_sessions=2)
    limits.check("c", 1, [info("a")])
    with pytest.raises(ConflictError, match=r"2 sessions are open.*--max-sessions is 2: b \(.*idle 7200 s\), a \("):
        limits.check("c", 1, [info("a"), info("b", idle_s=7200.5)])


def test_their_memory_is_limited_with_the_numbers() -> None:
    limits = SessionLimits(max_bytes=3 * 10**9)
    limits.check("c", 10**9, [info("a"), info("b")])
    with pytest.raises(ConflictError, match=r"'c' takes 1\.5 GB; 2 GB of 3 GB \(--session-memory\) are taken by 2"):
        limits.check("c", 15 * 10**8, [info("a"), info("b")])
    with pytest.raises(ConflictError, match="taken by 0 sessions; train fewer modules"):
        limits.check("c", 4 * 10**9, [])
