"""KTransformers' `fused_expert_lora.safetensors`: the routed experts' part of an adapter that kt-kernel trained.

The file lies beside adapter_model.safetensors, which has the other modules, and adapter_config.json, whose rank and
alpha hold for both. Keys are `layers.L.experts.{gate,up,down}_lora_{a,b}`; `a` is [E, R, in], `b` is [E, out, R], as
written by kt-kernel 0.7.2 (`kt_kernel.sft`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from kt_runtime.errors import AdapterError
from kt_runtime.families import LoraModule

FUSED_FILE = "fused_expert_lora.safetensors"
WRAPPER = ".orig_module"
"""The part that KTransformers' wrappers insert into the names of adapter_model.safetensors."""

_KEY = re.compile(r"layers\.(?P<layer>0|[1-9][0-9]{0,5})\.experts\.(?P<projection>gate|up|down)_lora_(?P<letter>[ab])")


def per_expert_tensors(
    tensors: Mapping[str, torch.Tensor], known: Mapping[str, LoraModule], where: str
) -> dict[str, torch.Tensor]:
    """The same tensors as `model.layers.L.mlp.experts.E.gate_proj.lora_A.weight` and so on: views, no copies.

    `known`: the model's modules by name. Raises AdapterError for a key or shape that the file can't have.
    """
    flat: dict[str, torch.Tensor] = {}
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        if match is None:
            raise AdapterError(f"{where}: unknown key {key!r}; expected layers.L.experts.gate_lora_a and the like")
        name = f"model.layers.{match['layer']}.mlp.experts.{match['projection']}_proj"
        if name not in known:
            raise AdapterError(f"{where}: {key!r}: layer {match['layer']} of this model has no routed experts")
        module = known[name]
        if tensor.dim() != 3 or tensor.shape[0] != module.num_experts:
            raise AdapterError(
                f"{where}: {key!r} has shape {list(tensor.shape)}; expected three dimensions, the first of "
                f"{module.num_experts} experts"
            )
        for expert, part in enumerate(tensor.unbind(0)):
            flat[f"{module.expert_name(expert)}.lora_{match['letter'].upper()}.weight"] = part
    return flat
