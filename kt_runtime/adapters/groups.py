"""Fused groups: SGLang computes q, k, v (q_a and kv_a; gate and up) in one linear, and needs LoRA for all or none.

With a missing member, SGLang's code fails with a KeyError, drops tensors, or fills in zeros of a wrong shape. So
missing members are filled in here with A = 0 and B = 0 of the right shapes, which leaves every result unchanged.
"""

from __future__ import annotations

from dataclasses import replace

from kt_runtime.adapters.tensors import AdapterTensors, LoraPair, zero_pair
from kt_runtime.families import Family, LoraModule
from kt_runtime.families.base import Config


def missing_members(adapter: AdapterTensors, family: Family, config: Config) -> list[LoraModule]:
    """The modules that `adapter` lacks although it adapts others of the same SGLang linear, in the model's order."""
    modules = family.lora_modules(config)
    touched = {module.source for module in modules if module.name in adapter.modules}
    return [module for module in modules if module.source in touched and module.name not in adapter.modules]


def complete_groups(adapter: AdapterTensors, family: Family, config: Config) -> AdapterTensors:
    """`adapter` with every group complete and its modules in the model's order; the same object if nothing changes."""
    missing = missing_members(adapter, family, config)
    order = [module.name for module in family.lora_modules(config)]
    names = adapter.modules.keys() | {module.name for module in missing}
    ordered = [name for name in order if name in names] + [name for name in adapter.modules if name not in set(order)]
    if not missing and ordered == list(adapter.modules):
        return adapter
    dtype = next(iter(adapter.modules.values())).a.dtype
    fillers = {module.name: zero_pair(module, adapter.rank, dtype) for module in missing}
    return replace(adapter, modules={name: _pick(name, adapter, fillers) for name in ordered})


def without_fillers(adapter: AdapterTensors) -> AdapterTensors:
    """`adapter` without the pairs whose A and B are all zero: such pairs get no gradient, so they can't be trained.

    No trained or fresh pair is among them: LoRA starts with B = 0 and a random A.
    """
    return replace(adapter, modules={name: pair for name, pair in adapter.modules.items() if _is_used(pair)})


def _pick(name: str, adapter: AdapterTensors, fillers: dict[str, LoraPair]) -> LoraPair:
    return fillers[name] if name in fillers else adapter.modules[name]


def _is_used(pair: LoraPair) -> bool:
    return bool(pair.a.any()) or bool(pair.b.any())
