"""Routed experts as PEFT 0.21 has them where transformers fuses them and PEFT knows no other form: gpt-oss.

PEFT's `target_parameters` adapt one fused parameter of all experts (`peft.tuners.lora.layer.ParamWrapper`): A
[E R, in] with the rows of one expert after another, B [out, R E] with the columns of all experts for each rank. The
wrappers of two parameters of a module lie in each other, the first one inside:

    NAME.experts.base_layer.lora_A.weight    gate_up_proj, where down_proj is adapted too
    NAME.experts.lora_A.weight               down_proj, or the only one

The names don't tell which parameter is which; the sizes do: gate_up_proj is [2 I, H], down_proj [H, I].

Gate and up share A in such a file. An adapter of ours, where each has its own, becomes one of twice the rank for
gate_up_proj, with zeros where gate's rank meets up's rows. Reading splits it again, without a change of a number.

Legend: E experts, R rank, H hidden size, I intermediate size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from kt_runtime.adapters.folding import Part
from kt_runtime.adapters.tensors import AdapterTensors, LoraPair
from kt_runtime.errors import AdapterError
from kt_runtime.families import EXPERTS, Family, LoraModule
from kt_runtime.families.base import Config

BOTH, DOWN = "gate_up_proj", "down_proj"
_KEY = re.compile(r"(?P<parent>.+\.experts)(?P<inner>\.base_layer)?\.lora_(?P<letter>[AB])\.weight")

Scaling = Callable[[str], float]
"""(alpha / rank) of a parameter by its name, `NAME.experts.gate_up_proj`."""


class _Layer(NamedTuple):
    gate: LoraModule
    up: LoraModule
    down: LoraModule


def fused_tensors(adapter: AdapterTensors, family: Family, config: Config) -> dict[str, torch.Tensor]:
    """The adapter's tensors by name, its routed experts fused. Gate and up are both there, or neither."""
    tensors = {
        f"{name}.lora_{letter}.weight": tensor
        for name, pair in adapter.modules.items()
        if not pair.is_stacked
        for letter, tensor in zip("AB", pair, strict=True)
    }
    is_interleaved = family.expert_mlp(config).is_interleaved
    for parent, layer in _layers(family, config).items():
        found = {}
        if layer.gate.name in adapter.modules:
            pairs = adapter.modules[layer.gate.name], adapter.modules[layer.up.name]
            found["gate_up"] = _joined(*pairs, is_interleaved)
        if layer.down.name in adapter.modules:
            found["down"] = adapter.modules[layer.down.name]
        for name, pair in found.items():
            inner = ".base_layer" if name == "gate_up" and len(found) == 2 else ""
            tensors[f"{parent}{inner}.lora_A.weight"] = pair.a.flatten(0, 1)
            tensors[f"{parent}{inner}.lora_B.weight"] = pair.b.permute(1, 2, 0).flatten(1)
    return tensors


def parameters_of(family: Family) -> tuple[str, ...]:
    """What PEFT's `target_parameters` may name: `mlp.experts.gate_up_proj` and `mlp.experts.down_proj`, say."""
    return tuple(f"{family.mlp_name}.experts.{name}" for name in (BOTH, DOWN))


def adapted_parameters(adapter: AdapterTensors, family: Family) -> list[str]:
    """PEFT's `target_parameters` for an adapter's routed experts."""
    projections = {name.rpartition(".")[2] for name, pair in adapter.modules.items() if pair.is_stacked}
    adapted = ("gate_proj" in projections, "down_proj" in projections)
    return [name for name, is_adapted in zip(parameters_of(family), adapted, strict=True) if is_adapted]


def is_fused(key: str) -> bool:
    return _KEY.fullmatch(key) is not None


def parts_of(
    tensors: Mapping[str, torch.Tensor], scaling: Scaling, family: Family, config: Config, where: str
) -> list[Part]:
    """The experts' parts of `tensors`, which are all of the fused form, without PEFT's prefix.

    Raises AdapterError for a tensor without its other half, for sizes of no parameter, and for a layer that has none.
    """
    layers, pairs = _layers(family, config), _pairs(tensors, where)
    parts: list[Part] = []
    is_interleaved = family.expert_mlp(config).is_interleaved
    for (parent, inner), (a, b) in pairs.items():
        if parent not in layers:
            raise AdapterError(f"{where}: {parent!r} is adapted; this model has no routed experts there")
        layer = layers[parent]
        pair, is_down = _stacked(a, b, layer, f"{where}: {parent}{inner}")
        factor = scaling(f"{parent}.{DOWN if is_down else BOTH}")
        found = {layer.down: pair} if is_down else _split(pair, layer, is_interleaved)
        for module, whole in found.items():
            single = zip(whole.a.unbind(0), whole.b.unbind(0), strict=True)
            parts += [Part(module, expert, LoraPair(*both), factor) for expert, both in enumerate(single)]
    return parts


def _layers(family: Family, config: Config) -> dict[str, _Layer]:
    """The layers with experts, by the name of the experts' module."""
    modules = {module.name: module for module in family.lora_modules(config) if module.group == EXPERTS}
    parents = dict.fromkeys(name.rpartition(".")[0] for name in modules)
    return {
        parent: _Layer(*(modules[f"{parent}.{name}"] for name in ("gate_proj", "up_proj", "down_proj")))
        for parent in parents
    }


def _joined(gate: LoraPair, up: LoraPair, is_interleaved: bool) -> LoraPair:
    """gate's and up's A [E, R, H] and B [E, I, R] as one of rank 2 R."""
    experts, rows, rank = gate.b.shape
    b = gate.b.new_zeros(experts, 2 * rows, 2 * rank)
    of_gate, of_up = _rows(b, is_interleaved)
    of_gate[:, :, :rank], of_up[:, :, rank:] = gate.b, up.b
    return LoraPair(torch.cat([gate.a, up.a], dim=1), b)


def _split(pair: LoraPair, layer: _Layer, is_interleaved: bool) -> dict[LoraModule, LoraPair]:
    """The pairs of gate and up: those that `_joined` has joined, or two that share A."""
    gate, up = _rows(pair.b, is_interleaved)
    half = pair.a.shape[1] // 2
    is_joined = pair.a.shape[1] == 2 * half and not bool(gate[:, :, half:].any()) and not bool(up[:, :, :half].any())
    if is_joined:
        first, second = pair.a[:, :half], pair.a[:, half:]
        return {layer.gate: LoraPair(first, gate[:, :, :half]), layer.up: LoraPair(second, up[:, :, half:])}
    return {layer.gate: LoraPair(pair.a, gate), layer.up: LoraPair(pair.a, up)}


def _rows(b: torch.Tensor, is_interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the rows of gate and of up in B [E, 2 I, R]."""
    if is_interleaved:
        return b[:, 0::2], b[:, 1::2]
    gate, up = b.chunk(2, dim=1)
    return gate, up


def _pairs(tensors: Mapping[str, torch.Tensor], where: str) -> dict[tuple[str, str], tuple[torch.Tensor, torch.Tensor]]:
    """A and B by the experts' module and ".base_layer" or ""."""
    found: dict[tuple[str, str], dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        assert match is not None
        found.setdefault((match["parent"], match["inner"] or ""), {})[match["letter"]] = tensor
    for (parent, inner), letters in found.items():
        for letter in "AB":
            if letter not in letters:
                raise AdapterError(
                    f"{where}: '{parent}{inner}.lora_{letter}.weight' is missing; its other half is there"
                )
    return {place: (letters["A"], letters["B"]) for place, letters in found.items()}


def _stacked(a: torch.Tensor, b: torch.Tensor, layer: _Layer, where: str) -> tuple[LoraPair, bool]:
    """A [E R, in] and B [out, R E] as [E, R, in] and [E, out, R], and whether they are of down_proj."""
    experts, hidden, rows = layer.gate.num_experts, layer.gate.in_features, layer.gate.out_features
    expected = {(hidden, 2 * rows): False, (rows, hidden): True}
    sizes = (a.shape[-1], b.shape[0])
    fits = a.dim() == b.dim() == 2 and sizes in expected and a.shape[0] == b.shape[1] and a.shape[0] % experts == 0
    if not fits or not a.shape[0]:
        raise AdapterError(
            f"{where}: A has shape {list(a.shape)} and B {list(b.shape)}; expected [{experts} R, {hidden}] and "
            f"[{2 * rows}, {experts} R] ({BOTH}), or [{experts} R, {rows}] and [{hidden}, {experts} R] ({DOWN})"
        )
    pair = LoraPair(a.unflatten(0, (experts, -1)), b.unflatten(1, (-1, experts)).permute(2, 0, 1))
    return pair, expected[sizes]
