"""Rank 0's decisions for one turn, serialised for a broadcast, so that all ranks run the same work.

Only rank 0 reads clocks, sockets and the frontend. The decisions contain everything that depends on these.
"""

from __future__ import annotations

import msgspec

from kt_runtime.resident.scheduler import Plan
from kt_runtime.wire.messages import AnyRequest
from kt_runtime.wire.replies import ErrorReply


class Arrived(msgspec.Struct, frozen=True, array_like=True):
    """A new request, with its arrays as (name, numpy dtype, bytes)."""

    request: AnyRequest
    arrays: list[tuple[str, str, bytes]]


class Ended(msgspec.Struct, frozen=True, array_like=True):
    """The worker job `key` has ended (`workers.py`); `error`: its failure, or None."""

    key: str
    error: ErrorReply | None


class Moved(msgspec.Struct, frozen=True, array_like=True):
    """The frontend's answer to a move: the name now means `lora_id`, or `error` is the reason why not."""

    lora_id: str
    error: ErrorReply | None


class Decisions(msgspec.Struct, frozen=True, array_like=True):
    """`plan`: the bounds of this turn's slices. `is_serving`: the slices count against the setting `train_share`.

    `adapter_bytes`: size of the adapter directory in rank 0's latest measurement (`publishing.holdings`). `salt`: set
    in rank 0's first decisions only; makes the adapter ids of this process unique.
    """

    arrived: list[Arrived]
    ended: list[Ended]
    moved: list[Moved]
    plan: Plan
    is_serving: bool
    salt: str = ""
    adapter_bytes: int = 0

    @property
    def is_empty(self) -> bool:
        return not (self.arrived or self.ended or self.moved or self.plan.num_slices or self.salt)


def encode(decisions: Decisions) -> bytes:
    return msgspec.msgpack.encode(decisions)


def decode(payload: bytes) -> Decisions:
    return msgspec.msgpack.decode(payload, type=Decisions)
