"""Hot experts as Prometheus metrics: `kt_runtime:gpu_experts_WHAT`, some for each layer, with the label `layer`.

As in `cache/prometheus.py`, the counters of another object are copied into Prometheus's, which the frontend reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kt_runtime.experts.gpu.hot.set import HotUse

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

PREFIX = "kt_runtime:gpu_experts"
COUNTED_BY_LAYER = {
    "hits": "pairs of token and expert of decode steps that the device computed",
    "misses": "pairs of token and expert of decode steps that the CPU computed",
}
LEVELS_BY_LAYER = {
    "hit_rate": "hits / (hits + misses) since the start",
    "resident": "experts on the device now",
    "slots": "experts that the device has room for",
}
OF_SLOTS = {"slot_bytes": "bytes of one slot; the label `format` has the format in which it holds an expert"}
COUNTED = {
    "moves": "copies of experts to the device",
    "moved_bytes": "bytes of these copies",
}
LEVELS = {
    "size_bytes": "bytes of all slots and of the pinned buffers",
    "scratch_bytes": "bytes of the device's memory for dequantized experts, beside them",
}


class PublishedHot:
    """Create it once per process. `registry`: None selects the client's default registry."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        from prometheus_client import REGISTRY, Counter, Gauge

        place = registry or REGISTRY
        self._counters = {
            name: Counter(f"{PREFIX}_{name}", f"Hot experts: {meaning}", labels, registry=place)
            for table, labels in ((COUNTED, ()), (COUNTED_BY_LAYER, ("layer",)))
            for name, meaning in table.items()
        }
        self._gauges = {
            name: Gauge(
                f"{PREFIX}_{name}", f"Hot experts: {meaning}", labels, registry=place, multiprocess_mode="mostrecent"
            )
            for table, labels in ((LEVELS, ()), (LEVELS_BY_LAYER, ("layer",)), (OF_SLOTS, ("layer", "format")))
            for name, meaning in table.items()
        }
        self._values: dict[tuple[str, ...], int] = {}

    def publish(self, use: HotUse) -> None:
        for name in COUNTED:
            self._count(name, getattr(use, name))
        for name in LEVELS:
            self._gauges[name].set(getattr(use, name))
        for layer in use.layers:
            index = str(layer.layer)
            self._count("hits", layer.hits, index)
            self._count("misses", layer.misses, index)
            levels = {
                "hit_rate": layer.hits / max(1, layer.hits + layer.misses),
                "resident": len(layer.resident),
                "slots": layer.slots,
            }
            for name, value in levels.items():
                self._gauges[name].labels(index).set(value)
            self._gauges["slot_bytes"].labels(index, layer.format).set(layer.slot_bytes)

    def _count(self, name: str, value: int, *labels: str) -> None:
        counter = self._counters[name].labels(*labels) if labels else self._counters[name]
        counter.inc(value - self._values.get((name, *labels), 0))
        self._values[name, *labels] = value
