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
class Beside:
    """What happens around the timed calls.

    read: measures the memory's bandwidth, before each of them and after the last. inside: seconds since it was last
    asked that the engine took, without Python. leads: an untimed call goes before each timed one, so that the engine's
    code and scratch are in the caches, as between the layers of a step; it must use other weights.
    """

    read: Callable[[], float]
    inside: Callable[[], float] | None = None
    leads: bool = False


@dataclass(frozen=True)
class Timing:
    ms: float  # the shortest call
    ms_median: float
    runs: int
    seconds: tuple[float, ...]  # of each call, where it is known without Python's part
    read_rates: tuple[float, ...] = ()  # of memory, bytes/s: before each call, and after the last; empty: not measured

    def dram_shares(self, weight_bytes: float) -> list[float]:
        """Of each call: the time that the reads just before and after it would have taken for `weight_bytes`, on
        average, over the call's time. Empty without reads."""
        around = zip(self.seconds, pairwise(self.read_rates), strict=False)
        return [weight_bytes * (1 / before + 1 / after) / 2 / taken for taken, (before, after) in around]


def measure(calls: Sequence[Callable[[], object]], patience: Patience, beside: Beside | None = None) -> Timing:
    """Times the calls cyclically until `patience` is satisfied. The first call is a warm-up; it counts only if
    it takes at least `patience.seconds`."""
    time.sleep(SETTLE_S)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        rates = [] if beside is None else [beside.read()]
        first = _times(calls[0], beside)
        if beside is not None:
            rates.append(beside.read())
        taken = [first] if first[0] >= patience.seconds else []
        rates = rates if taken else rates[1:]
        start = time.perf_counter() - sum(whole for whole, _ in taken)
        at = 0
        while _goes_on(len(taken), time.perf_counter() - start, patience):
            if beside is not None and beside.leads:
                calls[(at := at + 1) % len(calls)]()
            taken.append(_times(calls[(at := at + 1) % len(calls)], beside))
            if beside is not None:
                rates.append(beside.read())
    finally:
        if was_enabled:
            gc.enable()
    ms = [1e3 * whole for whole, _ in taken]
    return Timing(min(ms), median(ms), len(ms), tuple(inside for _, inside in taken), tuple(rates))


def _goes_on(runs: int, spent: float, patience: Patience) -> bool:
    if runs == 0:
        return True
    return spent < 5 * patience.seconds and (runs < patience.runs or spent < patience.seconds)


def _times(call: Callable[[], object], beside: Beside | None) -> tuple[float, float]:
    """(seconds of the call, of its part that `beside.inside` measures: without it, of all)."""
    if beside is not None and beside.inside is not None:
        beside.inside()
    start = time.perf_counter()
    call()
    whole = time.perf_counter() - start
    return whole, beside.inside() if beside is not None and beside.inside is not None else whole


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
