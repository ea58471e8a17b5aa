"""A request that is refused since too much else is going on, which is no mistake of its client's. Knows no SGLang.

SGLang 0.5.23's routes answer every ValueError with status 400, some of them after the exception has become a text. So
who raises `Overloaded` also notes it where whoever serves the request can see it: the middleware in front of SGLang's
routes answers 503.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from http import HTTPStatus

_noted: contextvars.ContextVar[list[Overloaded] | None] = contextvars.ContextVar("overloaded", default=None)


class Overloaded(ValueError):
    """`status_code`: SGLang's native route reads it."""

    status_code = HTTPStatus.SERVICE_UNAVAILABLE

    def __init__(self, message: str) -> None:
        super().__init__(message)
        noted = _noted.get()
        if noted is not None:
            noted.append(self)


@contextlib.contextmanager
def noting() -> Iterator[list[Overloaded]]:
    """What is raised for the request that is handled within, also in tasks that it starts."""
    noted: list[Overloaded] = []
    token = _noted.set(noted)
    try:
        yield noted
    finally:
        _noted.reset(token)
