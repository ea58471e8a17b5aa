"""Adapters to test with: made at random, written as PEFT directories, and merged into a Hugging Face model.

Written from PEFT's formula y = W x + (alpha / r) B A x and its file format alone; of kt-runtime it uses the list of a
model's modules and the type of an adapter only.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from kt_runtime.adapters import AdapterTensors, LoraPair
from kt_runtime.families import family_for
from kt_runtime.families.stack import ExpertMlp


def random_adapter(
    config: Mapping[str, Any], *, rank: int, alpha: float, seed: int, only: Collection[str] = ()
) -> AdapterTensors:
    """Neither A nor B is zero. `only`: groups ("attention", ...) or projections ("q_proj", ...); empty: all."""
    generator = torch.Generator().manual_seed(seed)
    modules = {}
    for module in family_for(config).lora_modules(config):
        if only and module.group not in only and module.projection not in only:
            continue
        stack = (module.num_experts,) if module.num_experts else ()
        a = torch.randn(*stack, rank, module.in_features, generator=generator) / module.in_features**0.5
        b = torch.randn(*stack, module.out_features, rank, generator=generator) * 0.3
        modules[module.name] = LoraPair(a, b)
    return AdapterTensors.from_modules(rank, alpha, modules)


def huge_adapter(config: Mapping[str, Any], **which: Any) -> AdapterTensors:
    """Finite numbers that no forward pass survives. Rank 4, alpha 8."""
    adapter = random_adapter(config, rank=4, alpha=8.0, seed=1, **which)
    pairs = {name: LoraPair(pair.a * 0 + 3e38, pair.b * 0 + 3e38) for name, pair in adapter.modules.items()}
    return AdapterTensors.from_modules(adapter.rank, adapter.alpha, pairs)


def write_adapter(directory: Path, adapter: AdapterTensors) -> Path:
    """A directory as PEFT 0.21 would save it, one pair of tensors per expert."""
    directory.mkdir(parents=True)
    tensors = {f"base_model.model.{name}": tensor.contiguous() for name, tensor in adapter.tensors.items()}
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "target_modules": adapter.targets,
        "bias": "none",
        "base_model_name_or_path": None,
    }
    (directory / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def joined(parts: Sequence[tuple[int, LoraPair | None]]) -> LoraPair:
    """A and B of a fused linear, of its parts one below the other (`sglang_patch.lora.adapter.FusedLora`); zeros for a
    part without a pair. At least one has one."""
    known = next(pair for _, pair in parts if pair is not None)
    pairs = [
        pair or LoraPair(torch.zeros_like(known.a), known.b.new_zeros(*known.b.shape[:-2], num_rows, known.b.shape[-1]))
        for num_rows, pair in parts
    ]
    return LoraPair(torch.cat([pair.a for pair in pairs], dim=-2), torch.cat([pair.b for pair in pairs], dim=-2))


@torch.no_grad()
def merge(model: torch.nn.Module, adapter: AdapterTensors) -> torch.nn.Module:
    """Adds the adapter to the weights of a Hugging Face model (transformers 5), in place."""
    parameters = dict(model.named_parameters())
    for name, pair in adapter.modules.items():
        rows(parameters, name, _expert_mlp(model, name)).add_(delta(pair, adapter.scaling))
    return model


def delta(pair: LoraPair, scaling: float) -> torch.Tensor:
    return scaling * (pair.b @ pair.a)


def _expert_mlp(model: Any, module: str) -> ExpertMlp:
    config = model.config.to_dict()
    return family_for(config).expert_mlp(config) if ".experts." in module else ExpertMlp()


def rows(parameters: Mapping[str, torch.Tensor], module: str, mlp: ExpertMlp) -> torch.Tensor:
    """The weight of `module`, a view: for routed experts, its rows of the fused parameter, as [E, out, in]."""
    parent, _, projection = module.rpartition(".")
    if not parent.endswith(".experts"):
        return parameters[f"{module}.weight"]
    fused = (parameters[f"{parent}.{name}"] for name in ("gate_up_proj", "down_proj"))
    both, down = (tensor.mT if mlp.is_transposed else tensor for tensor in fused)
    if projection == "down_proj":
        return down
    gate, up = (both[:, 0::2], both[:, 1::2]) if mlp.is_interleaved else both.chunk(2, dim=1)
    return gate if projection == "gate_proj" else up
