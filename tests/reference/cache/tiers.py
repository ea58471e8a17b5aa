"""Settings of a disk tier, the clock of its patience, and what tests do with it.

On a busy machine a thread may wait for seconds. So the patience is a minute where the disk works, and where it hangs
its clock is the test's.
"""

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
SHORT_S = 0.1


class PlayedClock:
    """In place of the module `time` in the tier's threads: time passes when the test says so.

    Threads that wait for an event still look at the clock every `patience_s` of real time, so give them SHORT_S.
    """

    def __init__(self) -> None:
        self._now_s = 100.0

    def monotonic(self) -> float:
        return self._now_s

    def passes(self, seconds: float) -> None:
        self._now_s += seconds


def settings(**changes: object) -> DiskTierSettings:
    fields = {
        "directory": ROOT,
        "quota_bytes": 1 << 20,
        "page_bytes": SIZE,
        "namespace": NAMESPACE,
        "patience_s": 60.0,
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
