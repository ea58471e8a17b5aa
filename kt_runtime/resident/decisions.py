"""What rank 0 decides in one turn, as bytes that any broadcast can carry, so that all ranks do the same.

Clocks, sockets and the frontend exist on rank 0 only; everything that follows from them is in here.
"""

from __future__ import annotations

import msgspec

from kt_runtime.resident.scheduler import Plan
from kt_runtime.wire.messages import AnyRequest, ErrorReply


class Arrived(msgspec.Struct, frozen=True, array_like=True):
    """A request; its arrays as (name, numpy dtype, bytes)."""

    request: AnyRequest
    arrays: list[tuple[str, str, bytes]]


class Ended(msgspec.Struct, frozen=True, array_like=True):
    """What ran beside the engine under `key` has ended (`workers.py`); `error` says what went wrong."""

    key: str
    error: ErrorReply | None


class Moved(msgspec.Struct, frozen=True, array_like=True):
    """The frontend's answer: the name that was to mean `lora_id` does, or `error` says why not."""

    lora_id: str
    error: ErrorReply | None


class Decisions(msgspec.Struct, frozen=True, array_like=True):
    """`plan`: which slices to run in this turn; `is_serving`: whether they count against the share.

    `salt`: in rank 0's first decisions only; makes the ids of this process's adapters unlike any other's.
    """

    arrived: list[Arrived]
    ended: list[Ended]
    moved: list[Moved]
    plan: Plan
    is_serving: bool
    salt: str = ""

    @property
    def is_empty(self) -> bool:
        return not (self.arrived or self.ended or self.moved or self.plan.num_slices or self.salt)


def encode(decisions: Decisions) -> bytes:
    return msgspec.msgpack.encode(decisions)


def decode(payload: bytes) -> Decisions:
    return msgspec.msgpack.decode(payload, type=Decisions)
