"""A measured case: the times of its calls, and its row of the result."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Any

from kt_runtime.bench.experts.limits import DRAM, Limits, Work, last_level_cache_bytes

SETTLE_S = 0.02  # until another library's threads stop spinning


@dataclass(frozen=True)
class Patience:
    """Measure at least `runs` calls and at least `seconds`, but at most about five times `seconds`."""

    runs: int
    seconds: float


@dataclass(frozen=True)
class Instruments:
    """What is measured around the timed calls.

    `read_rate`: measures the memory's bandwidth in bytes/s, before each of them and after the last. `engine_seconds`:
    the seconds that the engine computed, without Python's part, since the function was called last. `warms_code`: an
    untimed call precedes each timed one, so that the engine's code and scratch are in the caches, as between the layers
    of a step. It must use other weights.
    """

    read_rate: Callable[[], float]
    engine_seconds: Callable[[], float] | None = None
    warms_code: bool = False


@dataclass(frozen=True)
class Timing:
    ms: float  # the shortest call
    ms_median: float
    runs: int
    seconds: tuple[float, ...]  # of each call, where it is known without Python's part
    read_rates: tuple[float, ...] = ()  # of memory, bytes/s: before each call, and after the last; empty: not measured

    def dram_shares(self, weight_bytes: float) -> list[float]:
        """Each call's share of DRAM bandwidth: the time that the reads just before and after it would have taken for
        `weight_bytes`, on average, over the call's time. Empty if no reads were measured."""
        around = zip(self.seconds, pairwise(self.read_rates), strict=False)
        return [weight_bytes * (1 / before + 1 / after) / 2 / taken for taken, (before, after) in around]


def measure(
    calls: Sequence[Callable[[], object]], patience: Patience, instruments: Instruments | None = None
) -> Timing:
    """Times the calls cyclically until `patience` is satisfied. The first call is a warm-up; it counts only if
    it takes at least `patience.seconds`."""
    time.sleep(SETTLE_S)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        rates = [] if instruments is None else [instruments.read_rate()]
        first = _times(calls[0], instruments)
        if instruments is not None:
            rates.append(instruments.read_rate())
        taken = [first] if first[0] >= patience.seconds else []
        rates = rates if taken else rates[1:]
        start = time.perf_counter() - sum(whole for whole, _ in taken)
        at = 0
        while _goes_on(len(taken), time.perf_counter() - start, patience):
            if instruments is not None and instruments.warms_code:
                calls[(at := at + 1) % len(calls)]()
            taken.append(_times(calls[(at := at + 1) % len(calls)], instruments))
            if instruments is not None:
                rates.append(instruments.read_rate())
    finally:
        if was_enabled:
            gc.enable()
    ms = [1e3 * whole for whole, _ in taken]
    return Timing(min(ms), median(ms), len(ms), tuple(inside for _, inside in taken), tuple(rates))


def _goes_on(runs: int, spent: float, patience: Patience) -> bool:
    if runs == 0:
        return True
    return spent < 5 * patience.seconds and (runs < patience.runs or spent < patience.seconds)


def _times(call: Callable[[], object], instruments: Instruments | None) -> tuple[float, float]:
    """(seconds of the call, of its part in the engine; without `engine_seconds` both are the call's)."""
    engine_seconds = None if instruments is None else instruments.engine_seconds
    if engine_seconds is not None:
        engine_seconds()
    start = time.perf_counter()
    call()
    whole = time.perf_counter() - start
    return whole, whole if engine_seconds is None else engine_seconds()


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
    reuse_bytes: int  # that are read between two uses of an expert
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
        """`limits`: of the whole run. Reads between the calls, where there are any, take the place of its bandwidth."""
        values = {name: value for name, value in asdict(self).items() if name not in ("timing", "work")}
        timing, shares = self.timing, self.timing.dram_shares(self.work.weight_bytes)
        if timing.read_rates:
            limits = replace(limits, dram_bytes_per_s=median(timing.read_rates))
        needed_s, bound = self.work.limit(limits)
        seconds = timing.ms / 1e3
        return values | {
            "ms": timing.ms,
            "ms_median": timing.ms_median,
            "runs": timing.runs,
            "limit_ratio": median(shares) if shares and bound == DRAM else needed_s / seconds,
            "limit": bound,
            "dram_bytes_per_s": limits.dram_bytes_per_s,
            "dram_share": median(shares) if shares else None,
            "dram_share_least": min(shares, default=None),
            "dram_share_most": max(shares, default=None),
            "in_cache": self.reuse_bytes <= last_level_cache_bytes(),
            "weight_bytes_per_s": self.work.weight_bytes / seconds,
            "operations_per_s": sum(self.work.operations.values()) / seconds,
        }
