"""Requests refused because of overload or a client's limits, not of a mistake; tokens that count against such limits.

SGLang 0.5.23's routes answer every ValueError with status 400, some of them after converting the exception to text. So
`Overloaded` also records itself in a context variable, and the middleware in front of SGLang's routes answers its
`status_code`.

A client with a key of its own (`serve/http/client_keys.py`) may have a limit of tokens. SGLang knows those of a prompt
in `TokenizerManager._validate_one_request`, those of an answer in `._handle_batch_output`; `manager.py` overrides both.
The client's request reaches the first in a context variable, and the second in SGLang's request, which is copied for
several answers.

Does not import SGLang.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any, Protocol

DEFAULT_NEW_TOKENS = 128
"""Default of SGLang's `SamplingParams`, for a request that names no number."""


class Counted(Protocol):
    def take(self, num_prompt_tokens: int, num_new_tokens: int) -> None:
        """Raises ValueError: beyond the client's limits."""
        ...

    def answered(self, sequence: str, num_tokens: int) -> None:
        """`num_tokens`: of the answer `sequence` until now."""
        ...


client_request: ContextVar[Counted | None] = ContextVar("client_request", default=None)
_noted: ContextVar[list[Overloaded] | None] = ContextVar("overloaded", default=None)


class Overloaded(ValueError):
    """A refusal because of overload. SGLang's native route reads `status_code`."""

    status_code = HTTPStatus.SERVICE_UNAVAILABLE

    def __init__(self, message: str) -> None:
        super().__init__(message)
        noted = _noted.get()
        if noted is not None:
            noted.append(self)


class OverLimit(Overloaded):
    """A refusal because of the limits of the client's key."""

    status_code = HTTPStatus.TOO_MANY_REQUESTS


@contextlib.contextmanager
def noting() -> Iterator[list[Overloaded]]:
    """The `Overloaded` errors raised within this context, also in tasks that are started in the context."""
    noted: list[Overloaded] = []
    token = _noted.set(noted)
    try:
        yield noted
    finally:
        _noted.reset(token)


def take_tokens(request: Any, num_prompt_tokens: int, context_tokens: int) -> None:
    """`request`: SGLang's for one prompt, checked. Raises as `Counted.take`."""
    counted = client_request.get()
    if counted is None:
        return
    sampling = request.sampling_params or {}
    asked = sampling.get("max_new_tokens", DEFAULT_NEW_TOKENS)
    room = max(0, context_tokens - num_prompt_tokens)
    new_tokens = room if asked is None else min(asked, room)
    counted.take(num_prompt_tokens, new_tokens * (sampling.get("n") or 1))
    request.client_request = counted


def note_answers(states: Mapping[str, Any], sequences: Sequence[str], num_tokens: Sequence[int]) -> None:
    """`states`: SGLang's, by the request's id; `sequences`: the ids in a message of the engine."""
    for sequence, count in zip(sequences, num_tokens, strict=False):
        state = states.get(sequence)
        counted = None if state is None else getattr(state.obj, "client_request", None)
        if counted is not None:
            counted.answered(sequence, count)
