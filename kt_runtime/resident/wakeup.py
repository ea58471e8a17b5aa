"""Wakes the engine's thread when another thread has finished a job for it (eventfd(2)).

With it, the engine can sleep while it waits for a worker, a file write or the weights' hash.
"""

from __future__ import annotations

import contextlib
import os
import threading


class Wakeup:
    """`fd` polls readable from `set` to `clear`. `set` may be called by any thread, also after `close`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def set(self) -> None:
        with self._lock:
            if not self._closed:
                os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self.fd)
