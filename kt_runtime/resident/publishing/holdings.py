"""Limits on the adapters that a server holds: `serve --max-adapters`, `--max-adapter-disk`.

The number of names is exact. The engine's thread reads no disk, so another thread measures the directory every few
seconds. Files written between two measurements may exceed the limit. Only rank 0 measures; its result becomes a
decision (`decide`), so that all ranks refuse the same requests.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from collections.abc import Collection
from pathlib import Path

from kt_runtime.errors import LimitError

PAUSE_SECONDS = 2.0
LARGEST_SHARE = 0.02
"""Largest share of the time that measuring may take: a directory of many files is measured less often."""


class Holdings:
    """`directory`: that of the adapters. `max_names`, `max_bytes`: the limits; None: no limit. `measures`: this is rank
    0. `measured_bytes`: size of the directory in the latest measurement."""

    def __init__(
        self, directory: Path, max_names: int | None = None, max_bytes: int | None = None, *, measures: bool = True
    ) -> None:
        self._directory, self._max_names, self._max_bytes = directory, max_names, max_bytes
        self.measured_bytes = self._num_bytes = 0
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        if max_bytes is not None and measures:
            self._thread = threading.Thread(target=self._measure, name="kt-holdings", daemon=True)
            self._thread.start()

    def decide(self, num_bytes: int) -> None:
        """Every rank: sets the directory's size as rank 0 has measured it."""
        self._num_bytes = num_bytes

    def check_name(self, name: str, names: Collection[str]) -> None:
        """Raises LimitError if `name` would be one more than allowed. `names`: the names in use."""
        if self._max_names is not None and name not in names and len(names) >= self._max_names:
            raise LimitError(
                f"adapter {name!r}: {len(names)} adapters are there; allowed are {self._max_names} (--max-adapters). "
                "Unload one, or use a name that is there"
            )

    def check_disk(self, what: str) -> None:
        """Raises LimitError if the directory has reached its limit. Call it before files are written."""
        if self._max_bytes is not None and self._num_bytes >= self._max_bytes:
            raise LimitError(
                f"{what}: {self._directory} has {self._num_bytes} bytes; allowed are {self._max_bytes} "
                "(--max-adapter-disk). Remove the directories of adapters that are unloaded"
            )

    def is_inside(self, path: Path) -> bool:
        """Whether files written to `path` count."""
        return path.is_relative_to(self._directory)

    def close(self) -> None:
        self._closing.set()
        if self._thread is not None:
            self._thread.join()

    def _measure(self) -> None:
        pause_s = 0.0
        while not self._closing.wait(pause_s):
            began = time.monotonic()
            self.measured_bytes = bytes_below(self._directory)
            pause_s = max(PAUSE_SECONDS, (time.monotonic() - began) / LARGEST_SHARE)


def bytes_below(directory: Path) -> int:
    """Size of all regular files below `directory`; one that can't be read counts as empty."""
    total = 0
    for below, _, files in os.walk(directory):
        for name in files:
            with contextlib.suppress(OSError):
                status = os.lstat(os.path.join(below, name))
                total += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return total
