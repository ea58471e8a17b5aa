"""A rank's part of an adapter: B of a dense linear layer is split as its outputs are, LoRA of experts by expert.

A of a dense layer is whole on every rank, since every rank has all inputs; so is B of a layer that ranks do not split.
All of it is copied: a view would keep the memory of the whole adapter.
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
    pair, num_rows = part.pair, part.num_rows
    rows = Pieces(share, module.pieces or (module.out_features,))
    if not module.is_whole and not module.num_experts:
        num_rows = len(share.of(rows.total, "columns"))
    if pair is None:
        return LoraPart(num_rows, None)
    if module.is_whole:
        own = pair
    elif module.num_experts:
        experts = share.of(module.num_experts, "experts")
        own = LoraPair(pair.a[experts.start : experts.stop], pair.b[experts.start : experts.stop])
    else:
        own = LoraPair(pair.a, rows.own(pair.b, 0))
    return LoraPart(num_rows, LoraPair(own.a.clone(), own.b.clone()))
