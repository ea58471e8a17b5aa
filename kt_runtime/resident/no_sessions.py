"""What stands in the place of training's handlers in a server of several ranks that do not train this model."""

from __future__ import annotations

from kt_runtime.errors import ConflictError
from kt_runtime.resident.handlers import Arrays, SessionRequest
from kt_runtime.resident.scheduler import Slice, Slices
from kt_runtime.wire.messages import Publish
from kt_runtime.wire.status import SessionInfo


class NoSessions:
    """The part of `SessionHandlers` that the resident uses. Every request is refused."""

    def __init__(self, num_ranks: int, why: str) -> None:
        self._num_ranks, self._why = num_ranks, why

    def infos(self) -> list[SessionInfo]:
        return []

    def slices(self, request: SessionRequest, arrays: Arrays) -> Slices:
        """Raises ConflictError when it is run."""
        raise ConflictError(
            f"this server has {self._num_ranks} ranks (--tp-size {self._num_ranks}), which serve only: {self._why}; "
            "start one without --tp-size to train; `kt-runtime adapter load` brings here what was trained there"
        )
        yield

    def publish_ahead(self, request: Publish) -> None:
        """There is nothing to publish."""

    @staticmethod
    def opening(request: SessionRequest) -> Slice:
        return Slice(type(request).__name__, 1)

    def written(self, key: str) -> bool:
        return False
