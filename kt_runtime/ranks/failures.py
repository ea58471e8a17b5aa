"""Why the processes that compute a model together can't continue, and which of several reasons is the cause.

When one rank ends, the others fail within milliseconds, since their connections to it end. The user must be told the
cause: a rank that a signal has ended or stopped takes precedence over a host that is cut off, and that over a rank that
has ended with its own error.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

SIGNALLED, STOPPED, CUT_OFF, FAILED = range(4)


@dataclass(frozen=True)
class Failure:
    """`why`: names the rank or the host. `kind`: one of the numbers above, the nearest to the cause lowest. `status`:
    the exit status of the server's processes, 2 for what the user can correct."""

    why: str
    kind: int = FAILED
    status: int = 1


def cause_of(failures: Iterable[Failure]) -> Failure | None:
    """The first of the failures that are nearest to the cause; None without failures."""
    return min(failures, key=lambda failure: failure.kind, default=None)
