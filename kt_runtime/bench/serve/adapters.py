"""Random adapters on all targets of the model, loaded into a running server."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kt_runtime.adapters import AdapterTensors, LoraPair, write_peft_directory
from kt_runtime.cli.connection import ServerAPI
from kt_runtime.families import family_for

DTYPE = torch.bfloat16
OUTPUT_STD = 0.01  # the adapter changes an output by a few percent, so the routing stays near the base's


def load_adapters(api: ServerAPI, config: Mapping[str, Any], rank: int, count: int, directory: Path) -> list[str]:
    """Loads `count` different adapters of `rank` and returns their names. Leaves no files in `directory`."""
    family, first = family_for(config), random_adapter(config, rank)
    names = [f"bench-{number}" for number in range(count)]
    for number, name in enumerate(names):
        path = directory / name
        write_peft_directory(path, _scaled(first, 1 + number / 64), family, config, max_rank=rank, dtype=DTYPE)
        api.post("/kt/adapters", {"name": name, "path": str(path)})
        shutil.rmtree(path)
    return names


def random_adapter(config: Mapping[str, Any], rank: int) -> AdapterTensors:
    """An adapter on every module that the family can adapt; neither A nor B is zero."""
    generator = torch.Generator().manual_seed(0)

    def matrix(*shape: int, std: float) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * std).to(DTYPE)

    modules = {}
    for module in family_for(config).lora_modules(config):
        stack = (module.num_experts,) if module.num_experts else ()
        a = matrix(*stack, rank, module.in_features, std=module.in_features**-0.5)
        modules[module.name] = LoraPair(a, matrix(*stack, module.out_features, rank, std=OUTPUT_STD))
    return AdapterTensors.from_modules(rank, float(rank), modules)


def _scaled(adapter: AdapterTensors, factor: float) -> AdapterTensors:
    """Another adapter of the same size, in a fraction of the time that random numbers take."""
    modules = {name: LoraPair(pair.a * factor, pair.b) for name, pair in adapter.modules.items()}
    return AdapterTensors.from_modules(adapter.rank, adapter.alpha, modules)


def adapter_bytes(config: Mapping[str, Any], rank: int) -> int:
    """Bytes of one adapter's matrices."""
    modules = family_for(config).lora_modules(config)
    features = sum((each.in_features + each.out_features) * max(1, each.num_experts) for each in modules)
    return features * rank * DTYPE.itemsize
