"""A rank's part of an adapter: B of a dense linear layer is split as its outputs are, LoRA of experts by expert.

A of a dense layer is whole on every rank, since every rank has all inputs; so is B of a layer that ranks do not split.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from kt_runtime.adapters import LoraPair
from kt_runtime.families import LoraModule
from kt_runtime.ranks import Pieces, Share
from kt_runtime.sglang_patch.lora.adapter import InstalledAdapter, LoraPart, PoolKey, pool_key


def part_of(adapter: InstalledAdapter, modules: Iterable[LoraModule], share: Share) -> InstalledAdapter:
    """Copies of the rank's part. `modules`: those of the model, which say what is split."""
    members: dict[PoolKey, list[LoraModule]] = {}
    for module in sorted(modules, key=lambda module: module.start):
        members.setdefault(pool_key(module), []).append(module)
    with torch.inference_mode(False), torch.no_grad():
        weights = {
            key: tuple(_part(module, part, share) for module, part in zip(members[key], parts, strict=True))
            for key, parts in adapter.weights.items()
        }
    return replace(adapter, weights=weights)


def _part(module: LoraModule, part: LoraPart, share: Share) -> LoraPart:
    if module.is_whole:
        return part
    if module.num_experts:
        own = share.of(module.num_experts, "experts")
        return part._replace(pair=part.pair and LoraPair(*(each[own.start : own.stop].clone() for each in part.pair)))
    rows = Pieces(share, module.pieces or (module.out_features,))
    pair = part.pair and LoraPair(part.pair.a, rows.own(part.pair.b, 0).clone())
    return LoraPart(len(share.of(rows.total, "columns")), pair)
