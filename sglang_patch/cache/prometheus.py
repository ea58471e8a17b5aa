"""The prefix cache's tiers as Prometheus metrics: `kt_runtime:cache_TIER_WHAT`.

SGLang runs Prometheus's client in multiprocess mode: the scheduler's process counts in memory-mapped files, and the
frontend's `/metrics` sums them, also while the scheduler is busy. Only plain counters and gauges work in this mode, so
the tiers' own counters are copied into them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kt_runtime.wire.status import CacheTier

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Gauge

PREFIX = "kt_runtime:cache"
EVERY_TIER = {
    "hits": "pages that were asked for and there",
    "misses": "pages that were asked for and not there",
    "evictions": "pages removed to make room for others",
}
COPIED = {
    "bytes_read": "bytes of pages copied out of this tier",
    "bytes_written": "bytes of pages copied into this tier",
}
DISK = {
    "corrupt": "records that were not what they should be; each is a miss too",
    "records_written": "records written",
    "dropped": "pages offered and not written: no room in memory, the disk failing, too large",
    "read_errors": "reads that the system refused",
    "write_errors": "writes that the system refused",
    "late": "reads given up because the disk took too long",
    "read_ahead": "pages whose reading began before they were asked for",
}
LEVELS = {
    "pages": "pages held now",
    "used_bytes": "bytes that the pages held now take",
    "capacity_bytes": "bytes that pages may take",
}


class PublishedTiers:
    """Create it once per process. `registry`: None selects the client's default registry."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._registry = registry
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._values: dict[str, int] = {}

    def publish(self, tiers: list[CacheTier]) -> None:
        for tier in tiers:
            for name, meaning in _counted(tier).items():
                self._count(tier.tier, name, meaning, _value(tier, name))
            for name, meaning in LEVELS.items():
                self._set(tier.tier, name, meaning, _value(tier, name))
            if tier.tier == "disk":
                self._set("disk", "readable", "1 while it is read, 0 while it is not", tier.reading_stopped is None)
                self._set("disk", "writable", "1 while it is written, 0 while it is not", tier.writing_stopped is None)

    def _count(self, tier: str, name: str, meaning: str, value: int) -> None:
        from prometheus_client import REGISTRY, Counter

        name = f"{PREFIX}_{tier}_{name}"
        if name not in self._counters:
            help_text = f"Prefix cache, {tier}: {meaning}"
            self._counters[name] = Counter(name, help_text, registry=self._registry or REGISTRY)
        self._counters[name].inc(max(0, value - self._values.get(name, 0)))
        self._values[name] = value

    def _set(self, tier: str, name: str, meaning: str, value: int) -> None:
        from prometheus_client import REGISTRY, Gauge

        name = f"{PREFIX}_{tier}_{name}"
        if name not in self._gauges:
            help_text = f"Prefix cache, {tier}: {meaning}"
            registry = self._registry or REGISTRY
            self._gauges[name] = Gauge(name, help_text, registry=registry, multiprocess_mode="mostrecent")
        self._gauges[name].set(value)


def _counted(tier: CacheTier) -> dict[str, str]:
    return EVERY_TIER | (COPIED if tier.tier != "device" else {}) | (DISK if tier.tier == "disk" else {})


def _value(tier: CacheTier, name: str) -> int:
    value: int = getattr(tier, name) if hasattr(tier, name) else tier.counters[name]
    return value
