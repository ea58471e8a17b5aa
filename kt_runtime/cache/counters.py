"""Counters of a tier since the server began; `NAMES` are the disk tier's. One lock: several threads count."""

from __future__ import annotations

import threading
from collections.abc import Iterable

NAMES = (
    "hits",  # pages read and valid
    "misses",  # pages requested and not delivered, for whatever reason
    "bytes_read",  # payload of the hits
    "bytes_written",  # payload of the records written
    "records_written",
    "evictions",  # records removed to keep the quota
    "cleared",  # records removed on request
    "corrupt",  # records that did not match the index; each is a miss too
    "dropped",  # pages offered and not written: no memory, a failing disk, or too large
    "read_errors",  # reads that failed with an OSError
    "write_errors",
    "late",  # reads abandoned because the disk took too long
    "read_ahead",  # prefetched pages: reading began before the request
)


class Counters:
    def __init__(self, names: Iterable[str] = NAMES) -> None:
        self._lock = threading.Lock()
        self._values = dict.fromkeys(names, 0)

    def add(self, name: str, count: int = 1) -> None:
        with self._lock:
            self._values[name] += count

    def __getitem__(self, name: str) -> int:
        with self._lock:
            return self._values[name]

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return dict(self._values)
