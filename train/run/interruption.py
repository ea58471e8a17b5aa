"""Ctrl-C, or SIGTERM from a batch system: the first stops a run after its step, the second stops it at once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
MESSAGE = "interrupted: finishing this step, then saving; Ctrl-C again stops at once, without saving"


class Interruption:
    """A context in which the first of `SIGNALS` sets `requested` and the next raises KeyboardInterrupt.

    Only the main thread receives signals: in another thread no handler is installed, and `requested` stays False.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._previous: dict[signal.Signals, Any] = {}
        self.requested = False

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        with contextlib.suppress(RuntimeError):  # the signal interrupted a write to the same stream
            self._say(MESSAGE)
