"""A forked command that gets a signal at once when it has said a text, however late its reader comes to run.

SIGNALLED_AFTER in its environment: the signal's number, a space, the text.
"""

from __future__ import annotations

import io
import os
import signal
import sys

SIGNALLED_AFTER = "SIGNALLED_AFTER"


def after(text: str, number: signal.Signals) -> dict[str, str]:
    """What the environment must have."""
    return {SIGNALLED_AFTER: f"{number.value} {text}"}


def install() -> None:
    """In the process of the command, once its output is connected."""
    if wanted := os.environ.get(SIGNALLED_AFTER):
        number, _, text = wanted.partition(" ")
        sys.stdout = _Watched(int(number), text)


class _Watched(io.TextIOWrapper):
    def __init__(self, number: int, text: str) -> None:
        super().__init__(io.BufferedWriter(io.FileIO(1, "w", closefd=False)), encoding="utf-8", line_buffering=True)
        self._number, self._text = number, text

    def write(self, text: str) -> int:
        written = super().write(text)
        if self._text in text:
            self.flush()
            os.kill(os.getpid(), self._number)
        return written
