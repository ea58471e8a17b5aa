"""Settings of a disk tier whose patience is short, and what tests do with it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from reference.cache.files import contents, key_of, page_to_read, page_to_write, payload_of

from kt_runtime.cache.disk_tier import DiskTier, DiskTierSettings
from kt_runtime.cache.format import Namespace

ROOT = Path("/cache")
SIZE = 4096
NAMESPACE = Namespace(weights="w", kv_dtype="bfloat16", page_tokens=64, layout="page_first_direct")


def settings(**changes: object) -> DiskTierSettings:
    fields = {
        "directory": ROOT,
        "quota_bytes": 1 << 20,
        "page_bytes": SIZE,
        "namespace": NAMESPACE,
        "patience_s": 0.1,
        "interval_s": 0.02,
        "sync_interval_s": 0.05,
        "num_readers": 2,
    }
    return DiskTierSettings(**(fields | changes))  # type: ignore[arg-type]


def keys(numbers: range) -> list[bytes]:
    return [key_of(number) for number in numbers]


def write(tier: DiskTier, numbers: range) -> list[bool]:
    return tier.write([page_to_write(number) for number in numbers])


def present(tier: DiskTier, numbers: range) -> int:
    """Pages that are read from the first on; what is read must be right."""
    pages = [page_to_read(number) for number in numbers]
    hits = tier.read(pages)
    for number, page, hit in zip(numbers, pages, hits, strict=True):
        if hit:
            assert contents(page) == payload_of(number)
    count = hits.index(False) if False in hits else len(hits)
    assert not any(hits[count:])
    return count


def eventually(condition: Callable[[], object], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def stopped_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "stopped" in record.message]
