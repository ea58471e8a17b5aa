"""Why the processes that compute a model together can't go on, and which of several reasons was the first.

When one rank ends, the others fail within milliseconds, since their connections to it end. A user must hear of the one
at fault: a rank that a signal has ended or stopped comes before a host that is cut off, and this before a rank that has
ended with an error of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

SIGNALLED, STOPPED, CUT_OFF, FAILED = range(4)


@dataclass(frozen=True)
class Failure:
    """`why`: names the rank or the host. `kind`: one of the numbers above, the nearest to the cause lowest. `status`:
    the exit status of the server's processes, 2 for what the user can mend."""

    why: str
    kind: int = FAILED
    status: int = 1


def cause_of(failures: Iterable[Failure]) -> Failure | None:
    """The first of those that are nearest to the cause; None of none."""
    return min(failures, key=lambda failure: failure.kind, default=None)
