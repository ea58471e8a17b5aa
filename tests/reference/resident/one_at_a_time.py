"""Something costly, such as a model, that consecutive tests share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Generic, TypeVar

K = TypeVar("K")
T = TypeVar("T")


class OneAtATime(Generic[K, T]):
    """What `start` makes of a key is kept until another key is asked for, and ended then.

    pytest makes a module's parametrized fixture again for each row of a `parametrize` that names it, although the next
    row has an equal value.
    """

    def __init__(self, start: Callable[[K], AbstractContextManager[T]]) -> None:
        self._start, self._running = start, ExitStack()
        self._kept: list[tuple[K, T]] = []  # none or one

    def of(self, key: K) -> T:
        if not self._kept or self._kept[0][0] != key:
            self.close()
            self._kept.append((key, self._running.enter_context(self._start(key))))
        return self._kept[0][1]

    def close(self) -> None:
        self._kept.clear()
        self._running.close()
