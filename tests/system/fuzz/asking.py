"""Sends one request byte by byte as it was made, and judges the answer.

An answer is right when its status is 200, 4xx or 503 and an error tells no path of the server and no traceback.
"""

from __future__ import annotations

import http.client
import os
import re
import socket
import sys
import sysconfig
import time
from dataclasses import dataclass

from system.fuzz.bodies import HttpCase

# How long a small request may take before the server counts as hanging.
HANG_SECONDS = 60.0
# After these seconds without an answer to a request that asks for much, a small request tells a server that computes
# from one that hangs.
LONG_ANSWER_SECONDS = 20.0
# How long an answer to a request that asks for little may take. `make test` may run on a busy machine.
PATIENCE_SECONDS = 20.0 if os.environ.get("FUZZ_STRICT") else HANG_SECONDS
MOST_READ_BYTES = 32 << 20
TRACES = [rb"Traceback \(most recent", rb'File "/', rb"\.py\", line", rb"/site-packages/"]
TRACES += [re.escape(path.encode()) for path in (sys.prefix, sysconfig.get_path("stdlib"))]
_TRACE = re.compile(b"|".join(TRACES))
# An error in the middle of a stream, as SGLang writes it. The status went out before.
_FAULT_EVENT = re.compile(rb'data: \{"error":.*"code": ?500|data: \{"error":.*InternalServerError')


@dataclass(frozen=True)
class Answer:
    """`status` 0: none came. `seconds`: until the end of the answer, or until the client gave up."""

    status: int
    body: bytes
    seconds: float


class HungUp(Exception):
    """The client was made to go before the answer's end."""


def ask(address: tuple[str, int], case: HttpCase, patience_s: float = PATIENCE_SECONDS) -> Answer:
    """Raises HungUp; ConnectionError where nothing listens; TimeoutError after `patience_s`."""
    start = time.monotonic()
    with socket.create_connection(address, timeout=10.0) as opened:
        status, body = _exchange(opened, case, start + min(case.hangs_up_s or patience_s, patience_s), case.hangs_up_s)
    return Answer(status, body, time.monotonic() - start)


def _exchange(opened: socket.socket, case: HttpCase, deadline: float, hangs_up_s: float | None) -> tuple[int, bytes]:
    body = b""
    try:
        opened.settimeout(max(deadline - time.monotonic(), 0.01))
        _send(opened, case.wire())
        answer = http.client.HTTPResponse(opened, method=case.method)
        answer.begin()
        while len(body) < MOST_READ_BYTES:
            opened.settimeout(max(deadline - time.monotonic(), 0.01))
            part = answer.read1(1 << 16)
            if not part:
                return answer.status, body
            body += part
            if time.monotonic() > deadline:
                raise TimeoutError
        return answer.status, body
    except TimeoutError:
        if hangs_up_s is not None:
            raise HungUp from None
        raise
    except (http.client.HTTPException, ConnectionError):
        return 0, body


def _send(opened: socket.socket, content: bytes) -> None:
    """A server that refuses a body by its length closes before it was sent whole; its answer is there to be read."""
    try:
        opened.sendall(content)
    except (BrokenPipeError, ConnectionResetError):
        return


def fault_in(case: HttpCase, answer: Answer) -> str | None:
    """What is wrong with the answer, or None."""
    if answer.status == 0:
        # A request that promises more than it brings, or isn't HTTP any more, may be cut off without a word.
        return None if case.length is not None else "the connection was closed without an answer"
    if not (answer.status == 200 or 400 <= answer.status < 500 or answer.status == 503):
        return f"status {answer.status}: {answer.body[:300]!r}"
    shown = _TRACE.search(answer.body)
    if shown and shown.group() not in case.body:
        around = answer.body[max(shown.start() - 100, 0) : shown.end() + 200]
        return f"status {answer.status} shows {shown.group()!r}: {around!r}"
    event = _FAULT_EVENT.search(answer.body) if answer.status == 200 else None
    return f"status 200, then {answer.body[event.start() : event.start() + 300]!r}" if event else None
