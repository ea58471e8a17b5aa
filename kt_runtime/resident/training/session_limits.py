"""How many training sessions there may be, and what memory they may take together.

A session is there until it is closed, also when its client is gone. Without a limit, clients that come and go fill the
memory that the model is served from.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kt_runtime.errors import ConflictError
from kt_runtime.families import LoraModule
from kt_runtime.wire.messages import SessionInfo

TRAINED_BYTES = 16
"""Of one trained parameter: float32 master, gradient and both moments, as `serve.memory` plans."""

FROZEN_BYTES = 4
"""Of one parameter of a reference adapter."""


def num_parameters(modules: Iterable[LoraModule], rank: int) -> int:
    return sum(rank * (module.in_features + module.out_features) * max(1, module.num_experts) for module in modules)


@dataclass(frozen=True)
class SessionLimits:
    """`max_bytes`: of all sessions together, counted as if all had trained; None: not limited."""

    max_sessions: int = 64
    max_bytes: int | None = None

    def check(self, name: str, wanted_bytes: int, there: Sequence[SessionInfo]) -> None:
        """Raises ConflictError where the session `name` does not fit beside those that are there."""
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
    """Those that nobody has used for longest come first."""
    longest = sorted(there, key=lambda info: -info.idle_s)
    shown = [
        f"{info.session} (step {info.step}, {_gigabytes(info.num_bytes)}, idle {math.floor(info.idle_s)} s)"
        for info in longest[:8]
    ]
    return ", ".join(shown) + (f" and {len(there) - 8} more" if len(there) > 8 else "")
