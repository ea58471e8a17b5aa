"""Gives an adapter whose modules have several ranks and scalings one rank and one scaling.

SGLang serves every module at one rank and at `lora_alpha / r`; it ignores rsLoRA and patterns. So a module of a lower
rank is padded with zeros, which is exact. A module of another scaling s has its B multiplied by s / s_common in
float32: exact for a quotient that is a power of two, otherwise rounded to float32. The common scaling is the most
frequent one (the largest among equally frequent ones), so that most modules stay unchanged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kt_runtime.adapters.tensors import ALIGNMENT, AdapterTensors, LoraPair, allocated, expected_shapes
from kt_runtime.beside import pause
from kt_runtime.families import LoraModule


@dataclass(frozen=True)
class Part:
    """One LoRA pair of a file, for a dense module or one expert (`expert`). `scaling`: the one used in its training."""

    module: LoraModule
    expert: int | None
    pair: LoraPair
    scaling: float


def fold(parts: list[Part], plain_alpha: float | None) -> AdapterTensors:
    """All parts at their common scaling and largest rank; missing experts of an adapted projection become zero pairs.

    `plain_alpha` is lora_alpha if all parts have one rank and scaling: the value is kept as written.
    """
    rank = max(part.pair.a.shape[-2] for part in parts)
    common = _common_scaling(parts)
    experts: dict[str, dict[int, Part]] = {}
    modules: dict[str, LoraModule] = {}
    for part in parts:
        modules[part.module.name] = part.module
        if part.expert is not None:
            experts.setdefault(part.module.name, {})[part.expert] = part
    stacked = {name: _stacked_views(modules[name], of_module, rank, common) for name, of_module in experts.items()}
    # Tensors stay views of the file's bytes only if all experts are: else one small tensor would keep the whole file.
    owns = None in stacked.values()
    dense = {part.module.name: _uniform(part, rank, common, owns=owns) for part in parts if part.expert is None}
    views = {} if owns else stacked
    pairs = {
        name: dense.get(name) or views.get(name) or _stack(module, experts[name], rank, common)
        for name, module in modules.items()
    }
    alpha = plain_alpha if plain_alpha is not None else common * rank
    return AdapterTensors.from_modules(rank, alpha, pairs, _notes(parts, rank, common, alpha))


def _common_scaling(parts: list[Part]) -> float:
    counts = Counter(part.scaling for part in parts)
    return max(counts, key=lambda scaling: (counts[scaling], scaling))


def _uniform(part: Part, rank: int, common: float, *, owns: bool) -> LoraPair:
    """`owns`: nothing in the result is a tensor of `part`."""
    pair = part.pair.scaled(part.scaling / common).padded(rank)
    copied = (new.clone() if owns and new is old else new for new, old in zip(pair, part.pair, strict=True))
    return LoraPair(*copied)


def _stacked_views(module: LoraModule, parts: Mapping[int, Part], rank: int, common: float) -> LoraPair | None:
    """As `_stack`, without a copy, where the experts' tensors are adjacent in memory, from an aligned address on: in
    what `read_tensor_file` has read, or in a file's stacked tensor."""
    if any(part.scaling != common or part.pair.a.shape[0] != rank for part in parts.values()):
        return None
    if len(parts) < module.num_experts:
        return None
    pairs = [parts[expert].pair for expert in range(module.num_experts)]
    a, b = _one_view([pair.a for pair in pairs]), _one_view([pair.b for pair in pairs])
    return None if a is None or b is None or a.dtype != b.dtype else LoraPair(a, b)


def _one_view(tensors: list[torch.Tensor]) -> torch.Tensor | None:
    pause()
    first = tensors[0]
    if first.data_ptr() % ALIGNMENT:
        return None
    memory, begin = first.untyped_storage().data_ptr(), first.storage_offset()
    for number, each in enumerate(tensors):
        is_next = (
            each.untyped_storage().data_ptr() == memory and each.storage_offset() == begin + number * first.numel()
        )
        if not (is_next and each.is_contiguous() and (each.dtype, each.shape) == (first.dtype, first.shape)):
            return None
    return first.as_strided((len(tensors), *first.shape), (first.numel(), *first.stride()))


def _stack(module: LoraModule, parts: Mapping[int, Part], rank: int, common: float) -> LoraPair:
    pairs = {expert: part.pair.scaled(part.scaling / common) for expert, part in parts.items()}
    dtype = (
        torch.float32
        if len({t.dtype for pair in pairs.values() for t in pair}) > 1
        else next(iter(pairs.values())).a.dtype
    )
    shape_a, shape_b = expected_shapes(module, rank)
    a, b = allocated({"a": torch.Size(shape_a), "b": torch.Size(shape_b)}, dtype).values()
    for expert in range(module.num_experts):
        pause()
        pair = pairs.get(expert)
        if pair is None or pair.a.shape[0] < rank:
            a[expert].zero_()
            b[expert].zero_()
        if pair is not None:
            a[expert, : pair.a.shape[0]] = pair.a
            b[expert, :, : pair.b.shape[1]] = pair.b
    return LoraPair(a, b)


def _notes(parts: list[Part], rank: int, common: float, alpha: float) -> tuple[str, ...]:
    notes = []
    rescaled = sum(part.scaling != common for part in parts)
    padded = sum(part.pair.a.shape[-2] != rank for part in parts)
    if rescaled:
        notes.append(f"{rescaled} of {len(parts)} modules had another scaling; folded into lora_B ({alpha:g} / {rank})")
    if padded:
        notes.append(f"{padded} of {len(parts)} modules had a rank below {rank}; padded with zeros")
    return tuple(notes)
