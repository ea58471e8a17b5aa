"""The file that everything written by the server's processes goes to, bounded in size.

The processes write to it directly, through file descriptors 1 and 2, which the children inherit: what the last breath
of a process says is in it. Two files of at most `MOST_BYTES` are kept: the log, and the part before it (or the log of
the server before) with `.1` behind its name.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

MOST_BYTES = 8 << 20


class LogFile:
    """Not thread-safe but for `tail`: one thread reads, the one that redirects and restores is another's before or
    after it."""

    def __init__(self, path: Path, most_bytes: int = MOST_BYTES) -> None:
        """Creates the file, readable for this user only. A log that is there becomes the part before."""
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
        """What this process and its later children write to stdout and stderr goes to the file from now on."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._saved = (os.dup(1), os.dup(2))
        for number in (1, 2):
            os.dup2(self._descriptor, number)

    def restore(self) -> None:
        """Undoes `redirect`; nothing if it is undone already."""
        if self._saved is None:
            return
        sys.stdout.flush()
        sys.stderr.flush()
        for number, saved in zip((1, 2), self._saved, strict=True):
            os.dup2(saved, number)
            os.close(saved)
        self._saved = None

    def new_lines(self) -> list[str]:
        """Whole lines written since the last call. Starts the file anew when it has grown to its bound."""
        size = os.fstat(self._descriptor).st_size
        data = self._rest + os.pread(self._descriptor, max(0, size - self._position), self._position)
        self._position = size
        if size > self._most_bytes:
            self._start_anew()
        *lines, self._rest = data.split(b"\n")
        return [line.decode(errors="replace") for line in lines]

    def tail(self, count: int) -> list[str]:
        """The last lines that are not empty."""
        size = os.fstat(self._descriptor).st_size
        start = max(0, size - 64 * 1024)
        text = os.pread(self._descriptor, size - start, start).decode(errors="replace")
        return [line for line in text.splitlines() if line.strip()][-count:]

    def _start_anew(self) -> None:
        """Writers append, so that they go on at the new beginning. What they write between copy and truncation, a
        moment, is lost; where the disk has no room for the copy, all of the part before is."""
        try:
            shutil.copyfile(self.path, self._before)
        except OSError:
            self._before.unlink(missing_ok=True)
        os.truncate(self._descriptor, 0)
        self._position = 0
