"""An adapter in the layout of SGLang's LoRA memory pool: one A and one B per fused linear and layer.

Replaces SGLang 0.5.23's `sglang.srt.lora.lora.LoRAAdapter` (symbol; not patched) in `LoRAManager.loras`, where SGLang
reads `config.r` and `scaling` for every batch. Reason for a separate class: SGLang's class stores one tensor per expert
and concatenates them in Python loops, requires q with v, fills missing parts with wrong shapes, and loses precision by
folding the experts' scaling into the rounded B.

Legend: E experts, R rank, P parts of the fused linear (3 for qkv_proj, 2 for gate_up_proj, else 1).

    dense linear      A [P * R, in]      B [out of all parts, R]
    routed experts    A [E, P * R, in]   B [E, out of all parts, R]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from kt_runtime.adapters import AdapterTensors
from kt_runtime.adapters.tensors import allocated, copy_in_pieces, expected_shapes, on_threads
from kt_runtime.errors import AdapterError, UnknownNameError
from kt_runtime.families import LoraModule

POOL_NAMES = {"w13": "gate_up_proj_moe", "w2": "down_proj_moe"}
"""The pool's names for routed experts, by the last name of `LoraModule.source`. Dense linears keep that name."""

PoolKey = tuple[str, int]
"""(name in the pool, layer)."""


@dataclass(frozen=True, slots=True)
class FusedLora:
    """A and B of one fused linear, in the shapes above, and its number of parts."""

    a: torch.Tensor
    b: torch.Tensor
    parts: int


@dataclass(frozen=True, slots=True)
class RankAndAlpha:
    """The fields of a loaded adapter's config that SGLang reads for every batch."""

    r: int
    lora_alpha: float


@dataclass(frozen=True)
class InstalledAdapter:
    """Immutable; owns its tensors. `weights` has only the modules that the adapter changes.

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
        return sum(weight.a.nbytes + weight.b.nbytes for weight in self.weights.values())


def build_adapter(
    uid: str, adapter: AdapterTensors, modules: Iterable[LoraModule], dtype: torch.dtype
) -> InstalledAdapter:
    """Copies `adapter` into the pool's layout and dtype. `modules`: all modules of the model that LoRA can adapt.

    A missing part of a fused linear gets A = 0 and B = 0. Raises UnknownNameError for a module that the model does not
    have, and AdapterError for a tensor of the wrong shape.
    """
    by_name = {module.name: module for module in modules}
    for name in adapter.modules:
        if name not in by_name:
            raise UnknownNameError("module", name, by_name, where=f"adapter {uid}")
    touched = {by_name[name].source for name in adapter.modules}
    groups: dict[PoolKey, list[LoraModule]] = {}
    for module in by_name.values():
        if module.source in touched:
            groups.setdefault(pool_key(module), []).append(module)
    members = {key: sorted(group, key=lambda module: module.start) for key, group in groups.items()}
    with torch.inference_mode(False):
        as_ = allocated({key: _shapes(group, adapter.rank)[0] for key, group in members.items()}, dtype)
        bs = allocated({key: _shapes(group, adapter.rank)[1] for key, group in members.items()}, dtype)

    def fuse(key: PoolKey) -> FusedLora:
        with torch.inference_mode(False), torch.no_grad():
            return _fuse(members[key], adapter, as_[key], bs[key])

    weights = dict(zip(members, on_threads(fuse, list(members), adapter.num_bytes), strict=True))
    return InstalledAdapter(uid, RankAndAlpha(adapter.rank, adapter.alpha), weights)


def pool_key(module: LoraModule) -> PoolKey:
    last = module.source.rpartition(".")[2]
    return (POOL_NAMES.get(last, last) if module.num_experts else last), module.layer


def _shapes(members: list[LoraModule], rank: int) -> tuple[torch.Size, torch.Size]:
    """Of A and B. `members`: of one fused linear, in order."""
    first = members[0]
    stack = (first.num_experts,) if first.num_experts else ()
    a, b = (*stack, len(members) * rank, first.in_features), (*stack, members[-1].stop, rank)
    return torch.Size(a), torch.Size(b)


def _fuse(members: list[LoraModule], adapter: AdapterTensors, a: torch.Tensor, b: torch.Tensor) -> FusedLora:
    """Fills `a` and `b`, whose contents are arbitrary."""
    rank = adapter.rank
    if members[0].start != 0 or any(module.name not in adapter.modules for module in members):
        a.zero_()
        b.zero_()
    for part, module in enumerate(members):
        pair = adapter.modules.get(module.name)
        if pair is None:
            continue
        found = tuple(pair.a.shape), tuple(pair.b.shape)
        if found != expected_shapes(module, rank):
            raise AdapterError(
                f"{module.name}: lora_A and lora_B have shapes {found}, expected {expected_shapes(module, rank)}"
            )
        copy_in_pieces(a[..., part * rank : (part + 1) * rank, :], pair.a)
        copy_in_pieces(b[..., module.start : module.stop, :], pair.b)
    return FusedLora(a, b, len(members))
