"""A call in a thread of its own, whose result or error is collected later."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """Starts `call` at once. The thread does not keep the process alive: after a second Ctrl-C nothing waits for it."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._results: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="rollout", daemon=True)
        self._thread.start()

    def result(self) -> T:
        """Waits for the end. Raises what the call raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._results[0]

    def _run(self) -> None:
        try:
            self._results.append(self._call())
        except BaseException as error:  # noqa: BLE001 (handed on: `result` raises it)
            self._error = error
