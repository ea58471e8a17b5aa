"""The interface to the compiled module: tensors become DLPack capsules, native errors become kt_runtime.errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch.utils.dlpack import to_dlpack

from kt_runtime import _experts
from kt_runtime.errors import (
    CheckpointError,
    InvalidValueError,
    KtError,
    LostRankError,
    NotFoundError,
    NumericsError,
    UnknownNameError,
)

_KINDS: dict[str, type[KtError]] = {
    "invalid_value": InvalidValueError,
    "not_found": NotFoundError,
    "bad_checkpoint": CheckpointError,
    "numerics": NumericsError,
    "lost_rank": LostRankError,
}


@contextmanager
def translated_errors() -> Iterator[None]:
    try:
        yield
    except _experts.NativeError as error:
        raise translate(error) from None


def translate(error: Exception) -> KtError:
    """The exception of kt_runtime.errors for a NativeError, whose arguments are (kind, message)."""
    kind, message = error.args
    return _KINDS[kind](message)


def resolve_isa(name: str | None) -> str:
    """The instruction set called `name`, or the best one for None. UnknownNameError lists the available ones."""
    try:
        return _experts.resolve_isa(name or "")
    except _experts.NativeError:
        raise UnknownNameError("instruction set for this machine", name or "", _experts.available_isas()) from None


steps: WeakSet[_experts.Step] = WeakSet()
"""All native steps, which keep scratch memory of their own."""


def free_spare_memory() -> None:
    """Returns free scratch memory, including that of retained activations and native steps, to the system.

    Otherwise calls reuse this memory, until about 3,000 calls in a row needed less than half of it. Any thread may call
    this function: the scratch of a running call or step stays.
    """
    _experts.free_spare_memory()
    for step in list(steps):
        step.free_scratch()


def spare_memory_bytes() -> int:
    """Bytes that `free_spare_memory` would free, if no call is running."""
    return _experts.spare_memory_bytes() + sum(step.scratch_bytes for step in list(steps))


def require_tensor(value: object, name: str) -> None:
    if not isinstance(value, torch.Tensor):
        raise InvalidValueError(f"{name} is a {type(value).__name__}, expected a torch.Tensor")


def capsule(tensor: torch.Tensor, name: str) -> Any:
    """A DLPack capsule over the tensor's memory; valid while the capsule lives."""
    require_tensor(tensor, name)
    if tensor.layout != torch.strided:
        raise InvalidValueError(f"{name} has layout {tensor.layout}, expected torch.strided")
    return to_dlpack(tensor.detach() if tensor.requires_grad else tensor)
