"""Tensors a few at a time, so that work over all parameters of an adapter is cut into slices of about one length."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

from kt_runtime.resident.scheduler import Slice

SLICE_ELEMENTS = 1 << 22
"""Elements gone through between two looks at the request queue; a tensor is not cut, so that a slice may have more."""


def portions(
    kind: str, tensors: Mapping[str, torch.Tensor], names: Iterable[str] | None = None
) -> Iterator[tuple[Slice, list[str]]]:
    """Names in sorted order, as many together as have `SLICE_ELEMENTS`, with the slice of `kind` to announce for them.

    `names`: some of those in `tensors`, all by default. Another session may go before each portion.
    """
    chosen: list[str] = []
    elements = 0
    for name in sorted(tensors if names is None else names):
        chosen.append(name)
        elements += tensors[name].numel()
        if elements >= SLICE_ELEMENTS:
            yield Slice(kind, elements, may_switch=True), chosen
            chosen, elements = [], 0
    if chosen:
        yield Slice(kind, elements, may_switch=True), chosen


def freed(tensors: MutableMapping[str, Any]) -> Generator[Slice, None, None]:
    """Takes all out of `tensors`, in slices: the system needs 30 ms to take 1 GB back."""
    for upcoming, names in portions("free", tensors):
        yield upcoming
        for name in names:
            del tensors[name]
