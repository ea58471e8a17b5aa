"""LoRA on the twin: several adapters with float32 masters on one base, one adapter active at a time.

PEFT's layer with serving's rounding (`lora_linear`) wraps dense modules; routed experts get stacked A and B for the
expert store. `get_peft_model` on the whole model is not used: it silently skips modules of a fused-expert model.

A parameter is called `<module>.lora_A` or `<module>.lora_B`, with module names as in `kt_runtime.families`.

Shapes: dense A [R, in], B [out, R]; routed experts A [E, R, in], B [E, out, R]. Of several ranks each has the part of B
and of the experts that its twin has, and the whole A of dense modules.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from itertools import groupby

import torch
from peft import LoraConfig
from torch import nn

from kt_runtime.adapters import AdapterTensors
from kt_runtime.errors import InvalidValueError
from kt_runtime.experts import LoraSlot
from kt_runtime.families import LoraModule
from kt_runtime.resident.scheduler import Slice, run_at_once
from kt_runtime.resident.twin.lora_linear import LoraLinear
from kt_runtime.resident.twin.model import Twin
from kt_runtime.resident.twin.split import SplitLinear, SplitLoraLinear


class LoraModules:
    """All adapters on one twin, by key. A key has no dots (PEFT keeps it in a ModuleDict)."""

    def __init__(self, twin: Twin) -> None:
        self._twin = twin
        self._parameters: dict[str, dict[int, dict[str, nn.Parameter]]] = {}
        self._modules: dict[str, list[LoraModule]] = {}
        self._dropouts: dict[str, float] = {}
        self._selected: dict[int, tuple[str | None, bool]] = {}

    def create(
        self,
        key: str,
        modules: Sequence[LoraModule],
        values: Mapping[str, torch.Tensor],
        *,
        rank: int,
        alpha: float,
        dropout: float,
    ) -> Generator[Slice, None, dict[str, nn.Parameter]]:
        """Adds an adapter, one layer per slice, and returns its parameters, which alias `values` without a copy."""
        config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, init_lora_weights=False)  # type: ignore[arg-type]
        pairs = (
            (module, nn.Parameter(values[f"{module.name}.lora_A"]), nn.Parameter(values[f"{module.name}.lora_B"]))
            for module in sorted(modules, key=lambda module: module.layer)
        )
        by_layer = yield from self._place(key, pairs, config)
        return {name: value for layer in by_layer.values() for name, value in layer.items()}

    def create_frozen(
        self, key: str, adapter: AdapterTensors, modules: Sequence[LoraModule], *, experts_as_they_are: bool = False
    ) -> Generator[Slice, None, None]:
        """Adds the frozen `adapter` in float32, one layer per slice. `modules`: all LoRA modules of the model.

        Tensors that are float32 and on the device already are aliased, so the caller must not change them. So are
        those of routed experts, float32 or bfloat16 in host memory, with `experts_as_they_are`. Raises
        InvalidValueError for a module that is not in `modules`.
        """
        by_name = {module.name: module for module in modules}
        unknown = [name for name in adapter.modules if name not in by_name]
        if unknown:
            raise InvalidValueError(f"the reference adapter adapts {unknown[0]!r}, which the model does not have")
        config = LoraConfig(r=adapter.rank, lora_alpha=adapter.alpha, init_lora_weights=False)  # type: ignore[arg-type]

        def frozen(module: LoraModule, tensor: torch.Tensor) -> nn.Parameter:
            if not (experts_as_they_are and module.num_experts):
                tensor = tensor.to(self._twin.device, torch.float32)
            return nn.Parameter(tensor.detach(), requires_grad=False)

        found = sorted((by_name[name] for name in adapter.modules), key=lambda module: module.layer)
        pairs = (
            (each, frozen(each, adapter.modules[each.name].a), frozen(each, adapter.modules[each.name].b))
            for each in found
        )
        yield from self._place(key, pairs, config)

    def _place(
        self, key: str, pairs: Iterable[tuple[LoraModule, nn.Parameter, nn.Parameter]], config: LoraConfig
    ) -> Generator[Slice, None, dict[int, dict[str, nn.Parameter]]]:
        """Puts all (module, A, B) into the twin, or none on error; returns the parameters by layer and name.

        `pairs`: sorted by layer. No call may use `key` before the end.
        """
        by_layer: dict[int, dict[str, nn.Parameter]] = {}
        self._modules[key], self._parameters[key] = [], by_layer
        self._dropouts[key] = float(config.lora_dropout)
        try:
            for layer, of_layer in groupby(pairs, lambda pair: pair[0].layer):
                yield Slice("place", may_switch=True)
                self._place_layer(key, layer, of_layer, config)
        except BaseException:  # such as out of memory: removes the modules that were placed already
            self.remove(key)
            raise
        return by_layer

    def _place_layer(
        self,
        key: str,
        layer: int,
        pairs: Iterable[tuple[LoraModule, nn.Parameter, nn.Parameter]],
        config: LoraConfig,
    ) -> None:
        self._selected.clear()
        parameters = self._parameters[key].setdefault(layer, {})
        experts: dict[str, LoraSlot] = {}
        for module, a, b in pairs:
            parameters[f"{module.name}.lora_A"], parameters[f"{module.name}.lora_B"] = a, b
            self._modules[key].append(module)
            if module.num_experts:
                parent, _, projection = module.name.rpartition(".")
                slot = experts.setdefault(
                    parent, LoraSlot(scaling=config.lora_alpha / config.r, dropout=self._dropouts[key])
                )
                setattr(slot, projection.replace("_proj", "_a"), a)
                setattr(slot, projection.replace("_proj", "_b"), b)
            else:
                self._wrap(module.name, key, config, a, b)
        for parent, slot in experts.items():
            self._twin.experts[parent].adapters[key] = slot

    def remove(self, key: str) -> None:
        """Removes an adapter; a module without any adapter left is unwrapped."""
        run_at_once(self.removal(key))

    def removal(self, key: str) -> Generator[Slice, None, None]:
        """As `remove`, one layer per slice."""
        for layer, modules in groupby(self._modules.pop(key), lambda module: module.layer):
            yield Slice("take away", may_switch=True)
            self._selected.clear()
            for module in modules:
                self._detach(module, key)
            self._parameters[key].pop(layer, None)
        del self._parameters[key], self._dropouts[key]

    def _detach(self, module: LoraModule, key: str) -> None:
        if module.num_experts:
            self._twin.experts[module.name.rpartition(".")[0]].adapters.pop(key, None)
            return
        wrapped = self._twin.submodule(module.name)
        if not isinstance(wrapped, LoraLinear):  # wrapping had failed
            return
        wrapped.set_adapter([])  # else PEFT activates another one in its place, with a warning
        wrapped.delete_adapter(key)
        if not wrapped.lora_A:
            self._twin.replace(module.name, wrapped.get_base_layer())

    def parameters(self, key: str, layer: int) -> dict[str, nn.Parameter]:
        return self._parameters[key].get(layer, {})

    def lowest_layer(self, key: str) -> int:
        return min(self._parameters[key])

    def has_dropout(self, key: str) -> bool:
        return self._dropouts[key] > 0

    def select(self, layer: int, key: str | None, *, dropout: bool) -> None:
        """Makes `key` the only active adapter of this layer; None: the base alone. `dropout`: dropout is on."""
        if self._selected.get(layer) == (key, dropout):
            return
        for module in self._twin.layer(layer).modules():
            if isinstance(module, LoraLinear):
                module.set_adapter([] if key is None else [key])
                module.train(dropout)
        experts = self._twin.experts_of(layer)
        if experts is not None:
            experts.active, experts.drops_out = key, dropout
        self._selected[layer] = (key, dropout)

    def _wrap(self, name: str, key: str, config: LoraConfig, a: nn.Parameter, b: nn.Parameter) -> None:
        module = self._twin.submodule(name)
        with torch.device("meta"):  # PEFT allocates and initialises tensors, which are replaced below
            if isinstance(module, LoraLinear):
                module.update_layer(key, config.r, lora_alpha=config.lora_alpha, config=config)
            else:
                made = SplitLoraLinear if isinstance(module, SplitLinear) else LoraLinear
                module = made(module, key, config, r=config.r, lora_alpha=config.lora_alpha)
                self._twin.replace(name, module)
        # PEFT gives adapters the base's dtype; masters are always float32.
        module.lora_A[key].weight = a
        module.lora_B[key].weight = b
        module.set_adapter([])
        module.eval()


def initial_values(module: LoraModule, rank: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(A, B) in float32. A: Kaiming-uniform with a = sqrt(5), as in PEFT: uniform in ±1/sqrt(in). B: zero.

    A depends only on `seed` and the module's name. Thread-safe.
    """
    digest = hashlib.sha256(f"{seed}:{module.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    stack = (module.num_experts,) if module.num_experts else ()
    a = torch.empty(*stack, rank, module.in_features)
    bound = 1 / math.sqrt(module.in_features)
    a.uniform_(-bound, bound, generator=generator)
    return a, torch.zeros(*stack, module.out_features, rank)
