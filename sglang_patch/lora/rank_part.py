"""A rank's part of an adapter: B of a dense linear layer is split as its outputs are, LoRA of experts by expert.

A of a dense layer is whole on every rank, since every rank has all inputs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from kt_runtime.families import LoraModule
from kt_runtime.ranks import Share
from kt_runtime.sglang_patch.lora.adapter import FusedLora, InstalledAdapter, PoolKey, pool_key


def part_of(adapter: InstalledAdapter, modules: Iterable[LoraModule], share: Share) -> InstalledAdapter:
    """Copies of the rank's part. `modules`: those of the model, which say where the parts of a fused layer begin."""
    parts: dict[PoolKey, list[range]] = {}
    for module in modules:
        parts.setdefault(pool_key(module), []).append(range(module.start, module.stop))
    with torch.inference_mode(False), torch.no_grad():
        weights = {key: _part(weight, parts[key], share) for key, weight in adapter.weights.items()}
    return replace(adapter, weights=weights)


def _part(weight: FusedLora, parts: list[range], share: Share) -> FusedLora:
    if weight.a.dim() == 3:
        own = share.of(len(weight.a), "experts")
        return FusedLora(weight.a[own.start : own.stop].clone(), weight.b[own.start : own.stop].clone(), weight.parts)
    rows = [
        part.start + row for part in sorted(parts, key=lambda part: part.start) for row in share.of(len(part), "rows")
    ]
    return FusedLora(weight.a, weight.b[rows], weight.parts)
