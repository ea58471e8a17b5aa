"""How training shares the time with serving, as Prometheus metrics: `kt_runtime:training_WHAT`.

SGLang 0.5.23's processes share Prometheus's multiprocess files (see `cache/prometheus.py`), where only plain counters
and gauges work. `Scheduler.ingest_requests` publishes them about once a second, through `turns`; nothing is patched
here.
"""

from __future__ import annotations

import time
from typing import Any

from kt_runtime.wire.status import TrainingTurns

SYMBOLS: tuple[str, ...] = ()
PUBLISH_SECONDS = 1.0
PREFIX = "kt_runtime:training"
GAUGES = {
    "tpot_target_ms": "target for the time per output token, 0: none",
    "ttft_target_ms": "target for the time to the first token, 0: none",
    "tpot_p50_ms": "median time per output token of the latest requests",
    "tpot_p95_ms": "95th percentile of the time per output token of the latest requests",
    "ttft_p50_ms": "median time to the first token of the latest requests",
    "ttft_p95_ms": "95th percentile of the time to the first token of the latest requests",
    "train_share": "largest share of time for training while requests are served",
    "share_used": "training's share of the latest half a minute",
    "serving_s": "seconds of the engine's work for requests since the start",
    "training_s": "seconds of slices since the start",
    "budget_ms": "what the present turn may spend on training, -1: no limit",
    "slices": "slices run since the start",
    "parts": "slices that were cut since the start",
}


class TurnMetrics:
    """Create it once per process. `registry`: None selects the client's default registry."""

    def __init__(self, registry: Any = None) -> None:
        self._registry = registry
        self._gauges: dict[str, Any] = {}
        self._next_s = 0.0

    @property
    def is_due(self) -> bool:
        """True about once a second."""
        now = time.monotonic()
        if now < self._next_s:
            return False
        self._next_s = now + PUBLISH_SECONDS
        return True

    def publish(self, turns: TrainingTurns) -> None:
        for name, meaning in GAUGES.items():
            holder = turns.settings if hasattr(turns.settings, name) else turns
            value = getattr(holder, name)
            missing = -1.0 if name == "budget_ms" else 0.0
            self._gauge(name, meaning).set(missing if value is None else float(value))

    def _gauge(self, name: str, meaning: str) -> Any:
        from prometheus_client import REGISTRY, Gauge

        if name not in self._gauges:
            self._gauges[name] = Gauge(
                f"{PREFIX}_{name}",
                f"Training beside serving: {meaning}",
                registry=self._registry or REGISTRY,
                multiprocess_mode="mostrecent",
            )
        return self._gauges[name]
