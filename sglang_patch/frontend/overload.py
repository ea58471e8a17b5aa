"""The error for a request refused because of overload, not because of a client's mistake. Does not import SGLang.

SGLang 0.5.23's routes answer every ValueError with status 400, some of them after converting the exception to text. So
`Overloaded` also records itself in a context variable, and the middleware in front of SGLang's routes answers 503.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from http import HTTPStatus

_noted: contextvars.ContextVar[list[Overloaded] | None] = contextvars.ContextVar("overloaded", default=None)


class Overloaded(ValueError):
    """A refusal because of overload. SGLang's native route reads `status_code`."""

    status_code = HTTPStatus.SERVICE_UNAVAILABLE

    def __init__(self, message: str) -> None:
        super().__init__(message)
        noted = _noted.get()
        if noted is not None:
            noted.append(self)


@contextlib.contextmanager
def noting() -> Iterator[list[Overloaded]]:
    """The `Overloaded` errors raised within this context, also in tasks that are started in the context."""
    noted: list[Overloaded] = []
    token = _noted.set(noted)
    try:
        yield noted
    finally:
        _noted.reset(token)
