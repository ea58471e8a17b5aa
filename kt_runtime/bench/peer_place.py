"""Where a peer computes: on the accelerator what fits into its free memory, the rest on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kt_runtime.families.base import integer

CPU = "cpu"
BESIDES_BYTES = 3 << 30
"""Bytes of a device's memory that are left free for a peer's activations, KV cache and workspaces."""


@dataclass(frozen=True)
class PeerPlace:
    """`device`: where PyTorch computes, "cpu" or the accelerator's name. `layers`: decoder layers that llama.cpp keeps
    on the accelerator, the head counting as one more."""

    device: str = CPU
    layers: int = 0


ON_CPU = PeerPlace()


def peer_place(config: Mapping[str, Any], weight_bytes: int, kind: str | None, free_bytes: int) -> PeerPlace:
    """`weight_bytes`: of the whole model. `kind`: the accelerator's name, with `free_bytes` free; None: there is none.

    PyTorch gets the accelerator if the whole model fits, llama.cpp as many layers as fit.
    """
    if kind is None:
        return ON_CPU
    room = max(0, free_bytes - BESIDES_BYTES)
    layers = integer(config, "num_hidden_layers") + 1
    fitting = min(layers, layers * room // max(1, weight_bytes))
    return PeerPlace(kind if weight_bytes <= room else CPU, fitting)


def place_here(config: Mapping[str, Any], weight_bytes: int) -> PeerPlace:
    """`peer_place` on this machine, as its memory is free now. Imports torch."""
    from kt_runtime import device

    kind = device.accelerator()
    free = 0 if kind is None else device.memory(kind).free_bytes
    return peer_place(config, weight_bytes, None if kind is None else kind.type, free)
