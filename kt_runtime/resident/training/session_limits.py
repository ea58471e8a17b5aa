"""Limits on the number of training sessions and on their total memory.

A session stays open until it is closed, even if its client has disconnected. Without limits, abandoned sessions would
fill the memory that serving needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kt_runtime.errors import ConflictError
from kt_runtime.families import LoraModule
from kt_runtime.wire.status import SessionInfo

TRAINED_BYTES = 16
"""Bytes per trained parameter: float32 master, gradient and both moments, as `serve.memory` plans."""

FROZEN_BYTES = 4
"""Bytes per parameter of a reference adapter."""


def num_parameters(modules: Iterable[LoraModule], rank: int) -> int:
    return sum(rank * (module.in_features + module.out_features) * max(1, module.num_experts) for module in modules)


@dataclass(frozen=True)
class SessionLimits:
    """`max_bytes`: limit of all sessions together, each counted with gradient and moments; None: no limit."""

    max_sessions: int = 64
    max_bytes: int | None = None

    def check(self, name: str, wanted_bytes: int, there: Sequence[SessionInfo]) -> None:
        """Raises ConflictError if the new session `name` would exceed a limit, given the sessions `there`."""
        if len(there) >= self.max_sessions:
            raise ConflictError(
                f"session {name!r}: {len(there)} sessions are open, and --max-sessions is {self.max_sessions}: "
                f"{_listed(there)}; close one first (close_session)"
            )
        taken = sum(info.num_bytes for info in there)
        if self.max_bytes is not None and taken + wanted_bytes > self.max_bytes:
            raise ConflictError(
                f"session {name!r} takes {_gigabytes(wanted_bytes)}; {_gigabytes(taken)} of "
                f"{_gigabytes(self.max_bytes)} (--session-memory) are taken by {len(there)} sessions"
                f"{': ' + _listed(there) if there else ''}; train fewer modules or a lower rank, or close one first"
            )


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.3g} GB"


def _listed(there: Sequence[SessionInfo]) -> str:
    """At most 8 sessions for a message, the longest idle first."""
    longest = sorted(there, key=lambda info: -info.idle_s)
    shown = [
        f"{info.session} (step {info.step}, {_gigabytes(info.num_bytes)}, idle {math.floor(info.idle_s)} s)"
        for info in longest[:8]
    ]
    return ", ".join(shown) + (f" and {len(there) - 8} more" if len(there) > 8 else "")
