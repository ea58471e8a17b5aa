"""Times a call: one warm-up call, then calls until `Patience` is satisfied."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

SETTLE_S = 0.02  # until another library's threads stop spinning


@dataclass(frozen=True)
class Patience:
    """Measure at least `runs` calls and at least `seconds`, but at most about five times `seconds`."""

    runs: int
    seconds: float


@dataclass(frozen=True)
class Timing:
    ms: float  # the shortest call
    ms_median: float
    runs: int


def measure(calls: Sequence[Callable[[], object]], patience: Patience) -> Timing:
    """Times the calls cyclically. The first call is a warm-up; it counts only if it takes at least
    `patience.seconds`."""
    time.sleep(SETTLE_S)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        first = _seconds(calls[0])
        taken = [] if first < patience.seconds else [first]
        spent = sum(taken)
        while _goes_on(len(taken), spent, patience):
            taken.append(_seconds(calls[(len(taken) + 1) % len(calls)]))
            spent += taken[-1]
    finally:
        if was_enabled:
            gc.enable()
    return Timing(1e3 * min(taken), 1e3 * median(taken), len(taken))


def _goes_on(runs: int, spent: float, patience: Patience) -> bool:
    if runs == 0:
        return True
    return spent < 5 * patience.seconds and (runs < patience.runs or spent < patience.seconds)


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
