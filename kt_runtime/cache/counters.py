"""What a tier counted since the server began; `NAMES` are the disk tier's. One lock: several threads count."""

from __future__ import annotations

import threading
from collections.abc import Iterable

NAMES = (
    "hits",  # pages read and right
    "misses",  # pages asked for and not delivered, for whatever reason
    "bytes_read",  # payload of the hits
    "bytes_written",  # payload of the records written
    "records_written",
    "evictions",  # records removed to keep the quota
    "cleared",  # records removed because somebody asked for it
    "corrupt",  # records that were not what the index said: each is a miss too
    "dropped",  # pages offered and not written: no room in memory, the disk failing, too large
    "read_errors",  # reads that the system refused
    "write_errors",
    "late",  # reads given up because the disk took too long
    "read_ahead",  # pages whose reading began before they were asked for
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
