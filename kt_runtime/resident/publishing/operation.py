"""One operation on an adapter's name: a publication, a load, a rollback, or the restoring after a restart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from kt_runtime.adapters import AdapterVersion
from kt_runtime.resident.publishing.preparation import Preparation, Prepared
from kt_runtime.resident.training.session import SessionId

Done = Callable[[AdapterVersion | Exception], None]
"""Called once, with the version that the name means now (`lora_id` set), or with the error."""
Forgotten = Callable[[str | Exception | None], None]
"""Called once, with the last id that the name meant (None if it had none), or with the error."""
Followed = tuple[str, str]
"""The content hash of a version that another server published, and what users are told of it."""
Begin = Callable[[Preparation], Callable[[], Prepared]]


@dataclass
class Operation:
    """`begin`: returns stage 1's function; called when the operation starts. `preparation`: set from then on.
    `version`: known from stage 1 on.

    `session`: the publishing session, None for a load, a rollback or a restart. `claims`: the session becomes the
    name's owner (None: the name loses its owner). `restores`: after a restart, the disk is up to date. `path`: the
    file that is read. `is_moving`: the frontend was asked to move the name. `ahead`: the key of a worker's job that
    reads the file already. `follows`: another server has the version's files.
    """

    name: str
    lora_id: str
    begin: Begin
    done: Done
    session: SessionId | None = None
    claims: bool = False
    take_over: bool = False
    is_rollback: bool = False
    restores: bool = False
    path: str | None = None
    preparation: Preparation | None = None
    prepared: Prepared | None = None
    is_moving: bool = False
    ahead: str | None = None
    follows: bool = False

    @property
    def what(self) -> str:
        return f"adapter {self.name!r}" + (f" ({self.path})" if self.path is not None else "")

    @property
    def version(self) -> AdapterVersion:
        assert self.prepared is not None
        return replace(self.prepared.version, lora_id=self.lora_id)


def is_prepared(preparation: Preparation) -> Callable[[], Prepared]:
    raise AssertionError("stage 1 of this operation has run already")
