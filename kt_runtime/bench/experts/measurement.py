"""A measured case: the times of its calls, and its row of the result."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from kt_runtime.bench.experts.limits import Limits, Work

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
    """Times the calls cyclically until `patience` is satisfied. The first call is a warm-up; it counts only if
    it takes at least `patience.seconds`."""
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


@dataclass
class Row:
    """One row of the result: a case with its measurements."""

    shape: str
    experts: int
    format: str  # the requested format
    weight_format: str  # the store's name for the format
    isa: str
    threads: int
    tokens: int
    op: str
    timing: Timing
    work: Work
    touched_experts: int
    rel_error: float
    resident_bytes: int  # of the layer, packed
    weight_bytes: int  # of the layer, as a checkpoint stores that format
    peers: dict[str, float] = field(default_factory=dict)  # ms; for kt_kernel its fastest class
    peer_errors: dict[str, float] = field(default_factory=dict)
    kt_kernel_classes: dict[str, float] = field(default_factory=dict)  # ms
    # forward with int8 activations: the parts of rel_error from quantizing activations and from quantizing weights
    activation_error: float | None = None
    weight_error: float | None = None
    # forward_backward only
    activations: str | None = None  # "retain" or "recompute"
    ratio_to_forward: float | None = None  # to forward of the base alone
    ratio_to_lora_forward: float | None = None  # to forward with the same LoRA
    gradient_errors: dict[str, float] | None = None

    def as_json(self, limits: Limits) -> dict[str, Any]:
        values = {name: value for name, value in asdict(self).items() if name not in ("timing", "work")}
        needed_s, bound = self.work.limit(limits)
        seconds = self.timing.ms / 1e3
        return values | {
            "ms": self.timing.ms,
            "ms_median": self.timing.ms_median,
            "runs": self.timing.runs,
            "limit_ratio": needed_s / seconds,
            "limit": bound,
            "weight_bytes_per_s": self.work.weight_bytes / seconds,
            "operations_per_s": sum(self.work.operations.values()) / seconds,
        }
