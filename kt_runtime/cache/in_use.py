"""Closes a resource that other threads may be using: the last user closes it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


class InUse:
    """`close` is called once: by `abandon`, or by the last thread inside `using` at that time."""

    def __init__(self, close: Callable[[], None]) -> None:
        self._close = close
        self._lock = threading.Lock()
        self._users, self._is_closed = 0, False

    @contextlib.contextmanager
    def using(self) -> Iterator[bool]:
        """The resource stays open inside. Yields False if it was abandoned before."""
        with self._lock:
            is_open = not self._is_closed
            self._users += is_open
        try:
            yield is_open
        finally:
            if is_open:
                with self._lock:
                    self._users -= 1
                    is_last = self._is_closed and self._users == 0
                if is_last:
                    self._close()

    def abandon(self) -> None:
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
            is_last = not was_closed and self._users == 0
        if is_last:
            self._close()
