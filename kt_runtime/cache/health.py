"""Whether the disk is usable, for reading and for writing separately. Logs one line per failure and per recovery."""

from __future__ import annotations

import enum
import logging
import threading

logger = logging.getLogger(__name__)


class Use(enum.Enum):
    READING = "reading from"
    WRITING = "writing to"


class Availability:
    """`where` is for messages. Thread-safe."""

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
            logger.warning("cache: %s %s stopped, serving goes on without: %s", what, self._where, reason)

    def regain(self, *uses: Use) -> None:
        with self._lock:
            back = [use for use in uses if self._reasons.pop(use, None) is not None]
            self._late -= set(uses)
        if back:
            logger.info("cache: %s %s works again", " and ".join(use.value for use in back), self._where)
