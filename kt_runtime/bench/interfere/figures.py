"""The arithmetic of `bench interfere`: percentiles of requests' times, goodput, and the ratios that have a bar.

**Targets** follow from the warm server without training, at half load: `TPOT_FACTOR` times the 99th percentile of the
time per output token, `TTFT_FACTOR` times that of the time to the first token. AlpaServe (OSDI 2023), DistServe and
Sarathi-Serve (OSDI 2024) state targets as multiples of undisturbed times too, mostly 2 and more. A quarter more than
the p99 is stricter, and it is the bar for `p99_tpot_ratio`: a request in time is one that training may not have slowed
down by more than the bar allows.

**Goodput** is the number of requests that meet both targets, per second of arrivals (DistServe). A request's times
count from the moment at which it was to be sent.

**Plain time-sharing** (FlexLLM's temporal sharing) runs a training call of the session's ordinary batch to its end,
while requests wait; then requests have the server, until training is due again. Its share of time is what training got
while the same requests were served with targets. So both train about as fast, and goodput alone tells them apart.

**What is left over** for training has three readings, and all are reported. `1 - load`: the part of the capacity that
the load leaves. `idle_share`: the part of the same window without training in which the engine had no request. And
nothing taken off: training's speed of that alone, which is what FlexLLM publishes. `training_kept` is of `1 - load`.
Idle time is smaller, since few requests at once decode in small batches, which read nearly as many weights as large
ones; of idle time a server would keep the more the slower it serves.

Seconds in, milliseconds out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kt_runtime.bench.interfere.plan import HALF
from kt_runtime.resident.pacing.latencies import quantile

IDLE, TRAINING, WHOLE_CALLS = "idle", "training", "whole_calls"
PERCENTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
TPOT_FACTOR, TTFT_FACTOR = 1.25, 2.0
SHARES = (0.05, 0.95)


@dataclass(frozen=True)
class Answered:
    """Seconds on one clock. `sent`: when the request was to be sent. `events`: when each arrived, the tokens so far."""

    sent: float
    events: Sequence[tuple[float, int]]

    @property
    def first_token(self) -> float:
        return self.events[0][0] - self.sent

    @property
    def per_token(self) -> float | None:
        """Seconds per token, of the tokens after the first event; None if there are none."""
        (first, before), (last, after) = self.events[0], self.events[-1]
        return (last - first) / (after - before) if after > before else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between successive events."""
        return [later[0] - earlier[0] for earlier, later in zip(self.events, self.events[1:], strict=False)]


@dataclass(frozen=True)
class Trained:
    """Training in a window. `seconds`: the window's. `slices_s`: of them, those of training's slices. `step_s`: those
    of one training step, the mean of the steps that ended in the window; None: none did."""

    seconds: float
    slices_s: float
    step_s: float | None

    @property
    def steps(self) -> float | None:
        """Steps that the window has room for, the last one in part."""
        return self.slices_s / self.step_s if self.step_s else None


@dataclass(frozen=True)
class Window:
    """One load in one mode. `seconds`: of arrivals. `busy_share`: of the time until the last answer that the engine
    worked for requests."""

    load: float
    mode: str
    rate_per_s: float
    seconds: float
    answers: Sequence[Answered]
    busy_share: float
    trained: Trained | None = None

    def training_tokens_per_s(self, step_tokens: int) -> float | None:
        if self.trained is None or self.trained.steps is None:
            return None
        return step_tokens * self.trained.steps / self.trained.seconds


@dataclass(frozen=True)
class Targets:
    tpot_ms: float
    ttft_ms: float

    def are_met(self, answer: Answered) -> bool:
        per_token = answer.per_token
        return 1e3 * answer.first_token <= self.ttft_ms and (per_token is None or 1e3 * per_token <= self.tpot_ms)


def targets_of(idle: Window, tpot_ms: float | None, ttft_ms: float | None) -> Targets:
    """The stated ones, or multiples of `idle`, which must be warm: see the module's docstring."""
    return Targets(
        tpot_ms if tpot_ms is not None else TPOT_FACTOR * p99_per_token(idle),
        ttft_ms if ttft_ms is not None else TTFT_FACTOR * percentiles(_first_token(idle))["p99"],
    )


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Percentiles in milliseconds, by nearest rank."""
    return {name: 1e3 * quantile(seconds, share) for name, share in PERCENTILES.items()}


def p99_per_token(window: Window) -> float:
    """99th percentile of the time per output token, in milliseconds."""
    return percentiles(_per_token(window))["p99"]


def _per_token(window: Window) -> list[float]:
    return [each for answer in window.answers if (each := answer.per_token) is not None]


def _first_token(window: Window) -> list[float]:
    return [answer.first_token for answer in window.answers]


def tokens_per_s(step_ends: Sequence[float], step_tokens: int) -> float | None:
    """Rate between the first and the last end of a step; None with fewer than two."""
    if len(step_ends) < 2:
        return None
    return step_tokens * (len(step_ends) - 1) / (step_ends[-1] - step_ends[0])


def plain_share(kept: Window, step_tokens: int, alone_tokens_per_s: float) -> float:
    """Training's share of time in plain time-sharing: its speed while `kept` was served, over its speed alone."""
    trained = kept.training_tokens_per_s(step_tokens)
    lowest, highest = SHARES
    return min(highest, max(lowest, (trained or 0.0) / alone_tokens_per_s))


def row_of(window: Window, targets: Targets, step_tokens: int, alone_tokens_per_s: float) -> dict[str, Any]:
    trained, training = window.training_tokens_per_s(step_tokens), window.trained
    met = sum(targets.are_met(answer) for answer in window.answers)
    gaps = [gap for answer in window.answers for gap in answer.gaps]
    return {
        "load": window.load,
        "mode": window.mode,
        "requests_per_s": window.rate_per_s,
        "requests": len(window.answers),
        "ttft_ms": percentiles(_first_token(window)),
        "tpot_ms": percentiles(_per_token(window)),
        "gap_ms": percentiles(gaps),
        "busy_share": window.busy_share,
        "goodput_per_s": met / window.seconds,
        "met_share": met / len(window.answers),
        "training_time_share": None if training is None else training.slices_s / training.seconds,
        "training_tokens_per_s": trained,
        "training_share_of_alone": None if trained is None else trained / alone_tokens_per_s,
    }


def ratios(rows: Sequence[dict[str, Any]], seconds: float, alone: float, alone_with_targets: float) -> dict[str, Any]:
    """The figures that have a bar, at half load. `alone`, `alone_with_targets`: tokens/s of training without requests,
    without and with stated targets. None where no training step ended in a window.

    `training_kept`: training's speed during serving, over its speed alone times `left_over`, the share of the capacity
    that the load leaves. `training_kept_of_idle`: the same with `idle_share`, the measured idle time; None if there was
    none. `training_kept_of_alone`: over its speed alone. A goodput of plain time-sharing below one request counts as
    one request in the window of `seconds`. `plain_training_share`: training's speed with plain time-sharing, over that
    with targets.
    """
    half = {row["mode"]: row for row in rows if row["load"] == HALF}
    left_over, idle_share = 1.0 - HALF, 1.0 - half[IDLE]["busy_share"]
    kept = _ratio(half[TRAINING]["training_tokens_per_s"], alone)
    plain = max(half[WHOLE_CALLS]["goodput_per_s"], 1.0 / seconds)
    return {
        "p99_tpot_ratio": half[TRAINING]["tpot_ms"]["p99"] / half[IDLE]["tpot_ms"]["p99"],
        "training_kept": _ratio(kept, left_over),
        "training_kept_of_idle": _ratio(kept, idle_share),
        "training_kept_of_alone": kept,
        "training_alone_share": alone_with_targets / alone,
        "goodput_ratio": half[TRAINING]["goodput_per_s"] / plain,
        "plain_training_share": _ratio(
            half[WHOLE_CALLS]["training_tokens_per_s"], half[TRAINING]["training_tokens_per_s"]
        ),
        "left_over": left_over,
        "idle_share": idle_share,
    }


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole
