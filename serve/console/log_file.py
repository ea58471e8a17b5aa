"""The log file of the server's processes, bounded in size.

The processes write to the file directly, through file descriptors 1 and 2, which their children inherit. So the file
also has the last output of a process that crashes. Two files of at most `MOST_BYTES` are kept: the log, and the
previous part (or the previous server's log) with the suffix `.1`.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

MOST_BYTES = 8 << 20


class LogFile:
    """Only `tail` is thread-safe. One thread may read; another may redirect before it and restore after it."""

    def __init__(self, path: Path, most_bytes: int = MOST_BYTES) -> None:
        """Creates the file, readable for this user only. An existing log becomes the previous part."""
        self.path, self._most_bytes = path, most_bytes
        if path.exists():
            path.replace(self._before)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._position = 0
        self._rest = b""
        self._saved: tuple[int, int] | None = None

    @property
    def _before(self) -> Path:
        return self.path.with_name(f"{self.path.name}.1")

    def redirect(self) -> None:
        """Redirects stdout and stderr of this process and of its later children to the file."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._saved = (os.dup(1), os.dup(2))
        for number in (1, 2):
            os.dup2(self._descriptor, number)

    def restore(self) -> None:
        """Undoes `redirect`. Does nothing if there is nothing to undo."""
        if self._saved is None:
            return
        sys.stdout.flush()
        sys.stderr.flush()
        for number, saved in zip((1, 2), self._saved, strict=True):
            os.dup2(saved, number)
            os.close(saved)
        self._saved = None

    def new_lines(self) -> list[str]:
        """Whole lines written since the last call. Rotates the file when it has grown beyond its bound."""
        size = os.fstat(self._descriptor).st_size
        data = self._rest + os.pread(self._descriptor, max(0, size - self._position), self._position)
        self._position = size
        if size > self._most_bytes:
            self._restart()
        *lines, self._rest = data.split(b"\n")
        return [line.decode(errors="replace") for line in lines]

    def tail(self, count: int) -> list[str]:
        """The last `count` non-empty lines, from the last 64 KiB."""
        size = os.fstat(self._descriptor).st_size
        start = max(0, size - 64 * 1024)
        text = os.pread(self._descriptor, size - start, start).decode(errors="replace")
        return [line for line in text.splitlines() if line.strip()][-count:]

    def _restart(self) -> None:
        """Copies the file to the previous part, then truncates the file; writers use O_APPEND and continue at offset 0.

        Output written between copy and truncation is lost. If the disk is too full for the copy, the whole previous
        part is lost."""
        try:
            shutil.copyfile(self.path, self._before)
        except OSError:
            self._before.unlink(missing_ok=True)
        os.truncate(self._descriptor, 0)
        self._position = 0
