from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kt_runtime.cache.disk import DISK_COUNTERS
from kt_runtime.sglang_patch.cache.prometheus import PublishedTiers
from kt_runtime.wire.status import CacheTier


def tier(name: str, **values: Any) -> CacheTier:
    fields = {"page_tokens": 64, "page_bytes": 1000, "pages": 3, "used_bytes": 3000, "capacity_bytes": 9000}
    counts = {"hits": 0, "misses": 0, "evictions": 0}
    return CacheTier(tier=name, **{**fields, **counts, **values})


def disk(**values: Any) -> CacheTier:
    return tier(
        "disk", counters=dict.fromkeys(DISK_COUNTERS, 0) | values.pop("counters", {}), directory="/cache", **values
    )


def samples(registry: CollectorRegistry) -> dict[str, float]:
    lines = [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.split() for line in lines) if not name.endswith("_created")}


def test_counters_follow_the_tiers_and_levels_are_as_they_are_now() -> None:
    registry = CollectorRegistry()
    published = PublishedTiers(registry)
    published.publish([tier("device", hits=5, misses=2), disk(corrupt=1, bytes_read=700, counters={"dropped": 4})])
    published.publish([tier("device", hits=9, misses=2, pages=1), disk(corrupt=1, bytes_read=900)])
    found = samples(registry)
    assert found["kt_runtime:cache_device_hits_total"] == 9
    assert found["kt_runtime:cache_device_misses_total"] == 2
    assert found["kt_runtime:cache_device_pages"] == 1
    assert found["kt_runtime:cache_disk_corrupt_total"] == 1
    assert found["kt_runtime:cache_disk_bytes_read_total"] == 900
    assert found["kt_runtime:cache_disk_dropped_total"] == 4
    assert found["kt_runtime:cache_disk_capacity_bytes"] == 9000
    assert "kt_runtime:cache_device_bytes_read_total" not in found  # nothing is copied there
    assert not [name for name in found if "host" in name]


def test_a_disk_that_stopped_shows() -> None:
    registry = CollectorRegistry()
    published = PublishedTiers(registry)
    published.publish([disk(writing_stopped="No space left on device")])
    found = samples(registry)
    assert (found["kt_runtime:cache_disk_readable"], found["kt_runtime:cache_disk_writable"]) == (1, 0)
    published.publish([disk()])
    assert samples(registry)["kt_runtime:cache_disk_writable"] == 1


@pytest.mark.slow
def test_another_process_sees_what_one_published(tmp_path: Path) -> None:
    """As SGLang runs it: the scheduler counts, the frontend answers, also after the scheduler's last word."""
    scheduler = (
        "from kt_runtime.sglang_patch.cache.prometheus import PublishedTiers\n"
        "from kt_runtime.wire.status import CacheTier\n"
        "tier = CacheTier(tier='host', page_tokens=1, page_bytes=1, pages=7, used_bytes=7, capacity_bytes=9, hits=5,"
        " misses=6, evictions=8, bytes_read=11)\n"
        "published = PublishedTiers()\n"
        "published.publish([tier]); published.publish([tier])"
    )
    frontend = (
        "from prometheus_client import CollectorRegistry, generate_latest, multiprocess\n"
        "registry = CollectorRegistry()\n"
        "multiprocess.MultiProcessCollector(registry)\n"
        "print(generate_latest(registry).decode())"
    )
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "PYTHONSAFEPATH": "1"}
    for code in (scheduler, frontend):
        answer = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
    lines = answer.stdout.splitlines()
    for line in ("hits_total 5.0", "evictions_total 8.0", "bytes_read_total 11.0", "pages 7.0"):
        assert f"kt_runtime:cache_host_{line}" in lines
