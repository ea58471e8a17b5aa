"""What is known about the disk: whether it is usable, and counters of what it did."""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Iterable

logger = logging.getLogger(__name__)

DISK_COUNTERS = (
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


class Use(enum.Enum):
    READING = "reading from"
    WRITING = "writing to"


class Health:
    """Whether the disk is usable, for reading and for writing separately. Logs one line per failure and per recovery.

    `where` is for messages. Thread-safe.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._lock = threading.Lock()
        self._reasons: dict[Use, str] = {}
        self._late: set[Use] = set()

    def __getitem__(self, use: Use) -> bool:
        return use not in self._reasons

    def reason(self, use: Use) -> str | None:
        """Why `use` is stopped; None while it works."""
        return self._reasons.get(use)

    def is_late(self, use: Use) -> bool:
        """True if `use` is stopped because a call hangs; it works again once that call has returned."""
        return use in self._late

    def lose(self, reason: object, *uses: Use, is_late: bool = False) -> None:
        """Stops `uses`: the cache runs without them until `regain`. A hanging call (`is_late`) leaves a stopped use as
        it is; another reason replaces a hanging call, whose return is then no recovery."""
        with self._lock:
            lost = [use for use in uses if use not in self._reasons]
            self._reasons |= dict.fromkeys(uses if not is_late else lost, str(reason))
            self._late = self._late | set(lost) if is_late else self._late - set(uses)
        if lost:
            what = " and ".join(use.value for use in lost)
            logger.warning("cache: %s %s stopped, serving continues without it: %s", what, self._where, reason)

    def regain(self, *uses: Use) -> None:
        with self._lock:
            back = [use for use in uses if self._reasons.pop(use, None) is not None]
            self._late -= set(uses)
        if back:
            logger.info("cache: %s %s works again", " and ".join(use.value for use in back), self._where)


class Counters:
    """Counts of a tier since the server began. One lock: several threads count."""

    def __init__(self, names: Iterable[str] = DISK_COUNTERS) -> None:
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
