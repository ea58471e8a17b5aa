"""One row of the result: what one engine reached in one case, and what share of the machine's limits that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from kt_runtime.bench.gpu.limits import GpuLimits
from kt_runtime.bench.gpu.needs import Needs
from kt_runtime.bench.gpu.settings import DECODE


@dataclass(frozen=True)
class Row:
    """`size`: streams that decode at once, or tokens of the prompt or of the training step. `rates`: tokens/s of each
    counted run; empty: not measured. `needs`: of the whole prompt or step; None: not known of this engine.
    `resident`: experts of each layer on the device; `hit_rate`: share of the tokens' experts that were among them,
    None: not counted. `threshold_tokens`: of calls whose experts stream; None: no call's do. `device_bytes`: device
    memory of the engine's processes at the end; None: not measured. `problem`: why runs are missing; None: none is.
    """

    model: str
    engine: str
    setting: str
    kind: str
    size: int
    rates: Sequence[float] = field(default_factory=list)
    needs: Needs | None = None
    resident: int = 0
    hit_rate: float | None = None
    threshold_tokens: int | None = None
    device_bytes: int | None = None
    problem: str | None = None

    def as_json(self, limits: GpuLimits) -> dict[str, Any]:
        middle, least = (median(self.rates), min(self.rates)) if self.rates else (None, None)
        shares = self._shares(limits, middle)
        limit = max(shares, key=lambda name: shares[name]) if shares else None
        return {
            "model": self.model,
            "engine": self.engine,
            "setting": self.setting,
            "resident_experts": self.resident,
            "hit_rate": self.hit_rate,
            "threshold_tokens": self.threshold_tokens,
            "case": self.kind,
            "streams" if self.kind == DECODE else "tokens": self.size,
            "tokens_per_s": middle,
            "tokens_per_s_least": least,
            "tokens_per_s_runs": list(self.rates),
            "shares": shares,
            "shares_least": self._shares(limits, least),
            "limit": limit,
            "limit_share": None if limit is None else shares[limit],
            "device_bytes": self.device_bytes,
            "problem": self.problem,
        }

    def _shares(self, limits: GpuLimits, rate: float | None) -> dict[str, float]:
        """A prompt, a decode step (a token of each stream) or a training step takes size / rate seconds."""
        return {} if rate is None or self.needs is None else self.needs.shares(limits, self.size / rate)
