"""Adapters on disk to load: random numbers, a few of which are repeated, so that gigabytes are made in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kt_runtime.adapters import AdapterTensors, LoraPair, write_peft_directory
from kt_runtime.bench.swap.plan import Size, is_attention
from kt_runtime.families import family_for

DTYPE = torch.bfloat16
OUTPUT_STD = 0.01  # the adapter changes an output by a few percent
DRAWN = 1 << 20
"""Random numbers that are drawn; larger matrices repeat them."""


def write_adapter(path: Path, size: Size, config: Mapping[str, Any], seed: int) -> Path:
    """The directory of a PEFT adapter. Adapters of two seeds differ."""
    family = family_for(config)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(DRAWN, generator=generator).to(DTYPE)

    def matrix(*shape: int, std: float) -> torch.Tensor:
        numel = torch.Size(shape).numel()
        repeated = drawn.repeat(-(-numel // DRAWN))[:numel] if numel > DRAWN else drawn[:numel]
        return (repeated * std).view(shape)

    modules = {}
    for module in family.lora_modules(config):
        if size.targets == "all" or is_attention(module.name):
            stack = (module.num_experts,) if module.num_experts else ()
            a = matrix(*stack, size.rank, module.in_features, std=module.in_features**-0.5)
            b = matrix(*stack, module.out_features, size.rank, std=OUTPUT_STD)
            modules[module.name] = LoraPair(a, b)
    adapter = AdapterTensors.from_modules(size.rank, float(size.rank), modules)
    write_peft_directory(path, adapter, family, config, max_rank=size.rank, dtype=DTYPE)
    return path
