"""An adapter by the fused linears of SGLang's LoRA memory pool, in the pool's dtype: what a slot is filled from.

Replaces SGLang 0.5.23's `sglang.srt.lora.lora.LoRAAdapter` (symbol; not patched) in `LoRAManager.loras`, where SGLang
reads `config.r` and `scaling` for every batch. Reason for a separate class: SGLang's class stores one tensor per expert
and concatenates them in Python loops, requires q with v, fills missing parts with wrong shapes, and loses precision by
folding the experts' scaling into the rounded B.

Nothing is joined here: a slot is filled part by part (`pool.py`). Tensors that have the pool's dtype are not copied: an
adapter of gigabytes is in memory once, in addition to its slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from kt_runtime.adapters import AdapterTensors, LoraPair
from kt_runtime.adapters.tensors import allocated, copy_in_pieces, expected_shapes, on_threads
from kt_runtime.errors import AdapterError, UnknownNameError
from kt_runtime.families import LoraModule

POOL_NAMES = {"w13": "gate_up_proj_moe", "w2": "down_proj_moe"}
"""The pool's names for routed experts, by the last name of `LoraModule.source`. Dense linears keep that name."""

PoolKey = tuple[str, int]
"""(name in the pool, layer)."""


class LoraPart(NamedTuple):
    """`num_rows` outputs of a fused linear: those of q_proj, say. `pair`: A [R, in] and B [rows, R], each with a
    leading E for routed experts. None: nothing is adapted, A = 0 and B = 0.
    """

    num_rows: int
    pair: LoraPair | None


FusedLora = tuple[LoraPart, ...]
"""The parts of one fused linear, in the order of its outputs: q, k, v; gate, up."""


@dataclass(frozen=True, slots=True)
class RankAndAlpha:
    """The fields of a loaded adapter's config that SGLang reads for every batch."""

    r: int
    lora_alpha: float


@dataclass(frozen=True)
class InstalledAdapter:
    """Immutable; nothing changes its tensors. `weights` has only the modules that the adapter changes.

    SGLang looks for its own adapters' tensors in `layers` and `embedding_layers`; both are empty here.
    """

    uid: str
    config: RankAndAlpha
    weights: Mapping[PoolKey, FusedLora]
    layers: tuple[()] = ()
    embedding_layers: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def scaling(self) -> float:
        return self.config.lora_alpha / self.config.r

    @property
    def expert_scaling(self) -> float:
        """The factor for routed experts. SGLang's own adapters have it folded into B; an `InstalledAdapter` has not."""
        return self.scaling

    @property
    def adapts_experts(self) -> bool:
        return any(name in POOL_NAMES.values() for name, _ in self.weights)

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors; a part without a pair takes none."""
        pairs = (part.pair for parts in self.weights.values() for part in parts)
        return sum(pair.a.nbytes + pair.b.nbytes for pair in pairs if pair is not None)


def build_adapter(
    uid: str, adapter: AdapterTensors, modules: Iterable[LoraModule], dtype: torch.dtype
) -> InstalledAdapter:
    """`adapter` by fused linears, in `dtype`. `modules`: all modules of the model that LoRA can adapt.

    Tensors of another dtype are converted into copies. The others are `adapter`'s: nothing must change them afterwards.
    A missing part of a fused linear has no pair. Raises UnknownNameError for a module that the model does not have, and
    AdapterError for a tensor of the wrong shape.
    """
    by_name = {module.name: module for module in modules}
    for name, pair in adapter.modules.items():
        if name not in by_name:
            raise UnknownNameError("module", name, by_name, where=f"adapter {uid}")
        found, expected = (tuple(pair.a.shape), tuple(pair.b.shape)), expected_shapes(by_name[name], adapter.rank)
        if found != expected:
            raise AdapterError(f"{name}: lora_A and lora_B have shapes {found}, expected {expected}")
    pairs = _converted(adapter, dtype)
    touched = {by_name[name].source for name in adapter.modules}
    members: dict[PoolKey, list[LoraModule]] = {}
    for module in sorted(by_name.values(), key=lambda module: module.start):
        if module.source in touched:
            members.setdefault(pool_key(module), []).append(module)
    weights = {
        key: tuple(LoraPart(module.out_features, pairs.get(module.name)) for module in group)
        for key, group in members.items()
    }
    return InstalledAdapter(uid, RankAndAlpha(adapter.rank, adapter.alpha), weights)


def _converted(adapter: AdapterTensors, dtype: torch.dtype) -> dict[str, LoraPair]:
    others = {
        (name, letter): tensor
        for name, pair in adapter.modules.items()
        for letter, tensor in zip("AB", pair, strict=True)
        if tensor.dtype != dtype
    }
    with torch.inference_mode(False):
        copies = allocated({key: tensor.shape for key, tensor in others.items()}, dtype)

    def convert(key: tuple[str, str]) -> None:
        with torch.inference_mode(False), torch.no_grad():
            copy_in_pieces(copies[key], others[key])

    on_threads(convert, list(others), adapter.num_bytes)
    return {
        name: LoraPair(copies.get((name, "A"), pair.a), copies.get((name, "B"), pair.b))
        for name, pair in adapter.modules.items()
    }


def pool_key(module: LoraModule) -> PoolKey:
    last = module.source.rpartition(".")[2]
    return (POOL_NAMES.get(last, last) if module.num_experts else last), module.layer
