"""Cuts work over all parameters of an adapter into slices of similar duration: a few tensors at a time."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

from kt_runtime.resident.scheduler import Slice

SLICE_ELEMENTS = 1 << 22
"""Target number of elements per slice, between two checks of the request queue. Tensors are not split, so a slice may
have more."""


def portions(
    kind: str, tensors: Mapping[str, torch.Tensor], names: Iterable[str] | None = None
) -> Iterator[tuple[Slice, list[str]]]:
    """Groups of names in sorted order with about `SLICE_ELEMENTS` elements each, and the slice of `kind` to announce.

    `names`: a subset of `tensors`' names, all by default. Another session may run before each portion.
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
    """Empties `tensors`, in slices: the system needs 30 ms to free 1 GB."""
    for upcoming, names in portions("free", tensors):
        yield upcoming
        for name in names:
            del tensors[name]
