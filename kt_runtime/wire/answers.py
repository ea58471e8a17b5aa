"""The server's record of requests, so that a retried request does not run twice.

A request id is *in progress* (with the resident), *answered* (the reply's frames are kept) or *expired* (only the id is
kept). The number of ids in each state is bounded. Not thread-safe: the server's I/O thread owns the record.
"""

from __future__ import annotations

import enum
import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kt_runtime.errors import ConflictError, ServerBusyError


class Admission(enum.Enum):
    """NEW: the request must run. IN_PROGRESS: the request runs already; the latest sender will get the answer."""

    NEW = enum.auto()
    IN_PROGRESS = enum.auto()


@dataclass
class _InProgress:
    digest: bytes
    identity: bytes
    num_bytes: int


@dataclass(frozen=True)
class _Answer:
    digest: bytes
    frames: list[bytes]
    num_bytes: int


class AnswerBook:
    """`answers_kept` and `answers_kept_bytes` bound the kept answers; the newest answer is always kept.

    `ids_kept` bounds the expired ids, `max_pending` and `max_pending_bytes` bound the requests in progress.
    """

    def __init__(
        self, *, answers_kept: int, answers_kept_bytes: int, ids_kept: int, max_pending: int, max_pending_bytes: int
    ) -> None:
        self._answers_kept, self._answers_kept_bytes = max(answers_kept, 1), answers_kept_bytes
        self._ids_kept, self._max_pending, self._max_pending_bytes = ids_kept, max_pending, max_pending_bytes
        self._in_progress: dict[str, _InProgress] = {}
        self._answers: OrderedDict[str, _Answer] = OrderedDict()
        self._expired: OrderedDict[str, None] = OrderedDict()
        self._pending_bytes = self._kept_bytes = 0

    def admit(self, request_id: str, identity: bytes, frames: Sequence[bytes]) -> list[bytes] | Admission:
        """Decides what to do with a complete, well-formed request from the ZMQ identity `identity`.

        A returned list holds the frames of the first answer, to be sent again. Raises ConflictError if the id was used
        for another content or its answer has expired, ServerBusyError if too much is in progress. A rejected request
        leaves no record.
        """
        digest = content_digest(frames)
        known = self._in_progress.get(request_id) or self._answers.get(request_id)
        if known is not None:
            if known.digest != digest:
                raise ConflictError(f"request id {request_id!r} was used before for a request with different content")
            if isinstance(known, _Answer):
                return known.frames
            known.identity = identity
            return Admission.IN_PROGRESS
        if request_id in self._expired:
            raise ConflictError(f"request id {request_id!r} was executed before; its answer is no longer kept")
        num_bytes = sum(map(len, frames))
        self._check_room(num_bytes)
        self._in_progress[request_id] = _InProgress(digest, identity, num_bytes)
        self._pending_bytes += num_bytes
        return Admission.NEW

    def abandon(self) -> dict[str, bytes]:
        """Forgets the requests in progress, which get no answer; returns request id -> latest sender's identity."""
        abandoned = {request_id: request.identity for request_id, request in self._in_progress.items()}
        self._in_progress.clear()
        self._pending_bytes = 0
        return abandoned

    def _check_room(self, num_bytes: int) -> None:
        if len(self._in_progress) >= self._max_pending:
            raise ServerBusyError(f"{len(self._in_progress)} requests are in progress, which is the limit; try later")
        if self._in_progress and self._pending_bytes + num_bytes > self._max_pending_bytes:
            raise ServerBusyError(
                f"requests of {self._pending_bytes} bytes are in progress and {num_bytes} more would pass the "
                f"{self._max_pending_bytes} allowed; try later"
            )

    def finish(self, request_id: str, frames: list[bytes]) -> bytes:
        """Keeps the answer to a request in progress and returns the identity of the request's latest sender."""
        request = self._in_progress.pop(request_id)
        self._pending_bytes -= request.num_bytes
        answer = _Answer(request.digest, frames, sum(map(len, frames)))
        self._answers[request_id] = answer
        self._kept_bytes += answer.num_bytes
        while len(self._answers) > self._answers_kept or (
            self._kept_bytes > self._answers_kept_bytes and len(self._answers) > 1
        ):
            oldest, dropped = self._answers.popitem(last=False)
            self._kept_bytes -= dropped.num_bytes
            self._expired[oldest] = None
        while len(self._expired) > self._ids_kept:
            self._expired.popitem(last=False)
        return request.identity


def content_digest(frames: Sequence[bytes]) -> bytes:
    """A hash of the frames and their lengths."""
    digest = hashlib.blake2b(digest_size=16)
    for frame in frames:
        digest.update(len(frame).to_bytes(8, "little"))
        digest.update(frame)
    return digest.digest()
