"""A rank's part of an adapter: B of a dense linear layer is split as its outputs are, LoRA of experts by expert.

A of a dense layer is whole on every rank, since every rank has all inputs; so is B of a layer that ranks do not split.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from kt_runtime.families import LoraModule
from kt_runtime.ranks import Pieces, Share
from kt_runtime.sglang_patch.lora.adapter import FusedLora, InstalledAdapter, PoolKey, pool_key


def part_of(adapter: InstalledAdapter, modules: Iterable[LoraModule], share: Share) -> InstalledAdapter:
    """Copies of the rank's part. `modules`: those of the model, which say where the parts of a fused layer begin."""
    parts: dict[PoolKey, list[int]] = {}  # sizes of the parts that ranks split, in order
    for module in sorted(modules, key=lambda module: module.start):
        if not module.is_whole:
            parts.setdefault(pool_key(module), []).extend(module.pieces or (module.out_features,))
    with torch.inference_mode(False), torch.no_grad():
        weights = {
            key: _part(weight, parts[key], share) if key in parts else weight for key, weight in adapter.weights.items()
        }
    return replace(adapter, weights=weights)


def _part(weight: FusedLora, parts: list[int], share: Share) -> FusedLora:
    if weight.a.dim() == 3:
        own = share.of(len(weight.a), "experts")
        return FusedLora(weight.a[own.start : own.stop].clone(), weight.b[own.start : own.stop].clone(), weight.parts)
    return FusedLora(weight.a, Pieces(share, tuple(parts)).own(weight.b, 0).clone(), weight.parts)
