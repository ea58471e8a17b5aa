"""LoRA on the twin: several adapters side by side on one base, float32 masters, one of them active at a time.

Dense modules are wrapped by PEFT's layer with serving's roundings (`lora_linear`), routed experts get stacked A and B
that the expert store takes. Never `get_peft_model` on the whole model: what it leaves out of a fused-expert model it
leaves out silently.

A parameter is called `<module>.lora_A` or `<module>.lora_B`, with module names as in `kt_runtime.families`.

Shapes: dense A [R, in], B [out, R]; routed experts A [E, R, in], B [E, out, R].
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
        """Adds an adapter, a layer at a time, and returns its parameters. They are `values`, which are not copied."""
        config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, init_lora_weights=False)  # type: ignore[arg-type]
        pairs = (
            (module, nn.Parameter(values[f"{module.name}.lora_A"]), nn.Parameter(values[f"{module.name}.lora_B"]))
            for module in sorted(modules, key=lambda module: module.layer)
        )
        by_layer = yield from self._place(key, pairs, config)
        return {name: value for layer in by_layer.values() for name, value in layer.items()}

    def create_frozen(
        self, key: str, adapter: AdapterTensors, modules: Sequence[LoraModule]
    ) -> Generator[Slice, None, None]:
        """Adds `adapter` in float32, which nothing trains, a layer at a time. `modules`: all that the model has.

        Tensors that are float32 and on the device already are used as they are; nobody may change them. Raises
        InvalidValueError for a module that is none of `modules`.
        """
        by_name = {module.name: module for module in modules}
        unknown = [name for name in adapter.modules if name not in by_name]
        if unknown:
            raise InvalidValueError(f"the reference adapter adapts {unknown[0]!r}, which the model does not have")
        config = LoraConfig(r=adapter.rank, lora_alpha=adapter.alpha, init_lora_weights=False)  # type: ignore[arg-type]

        def frozen(tensor: torch.Tensor) -> nn.Parameter:
            return nn.Parameter(tensor.detach().to(self._twin.device, torch.float32), requires_grad=False)

        names = sorted(adapter.modules, key=lambda name: by_name[name].layer)
        pairs = ((by_name[name], frozen(adapter.modules[name].a), frozen(adapter.modules[name].b)) for name in names)
        yield from self._place(key, pairs, config)

    def _place(
        self, key: str, pairs: Iterable[tuple[LoraModule, nn.Parameter, nn.Parameter]], config: LoraConfig
    ) -> Generator[Slice, None, dict[int, dict[str, nn.Parameter]]]:
        """Puts (module, A, B) into the twin, all or none; returns the parameters by layer and name.

        `pairs` in the order of layers. No call may use `key` before the end.
        """
        by_layer: dict[int, dict[str, nn.Parameter]] = {}
        self._modules[key], self._parameters[key] = [], by_layer
        self._dropouts[key] = float(config.lora_dropout)
        try:
            for layer, of_layer in groupby(pairs, lambda pair: pair[0].layer):
                yield Slice("place", may_switch=True)
                self._place_layer(key, layer, of_layer, config)
        except BaseException:  # out of memory: what is placed already goes with the rest
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
        """Takes an adapter away; a module that no adapter is left on becomes the plain one again."""
        run_at_once(self.removal(key))

    def removal(self, key: str) -> Generator[Slice, None, None]:
        """As `remove`, a layer at a time."""
        for layer, modules in groupby(self._modules.pop(key), lambda module: module.layer):
            yield Slice("take away", may_switch=True)
            self._selected.clear()
            for module in modules:
                self._take_away(module, key)
            self._parameters[key].pop(layer, None)
        del self._parameters[key], self._dropouts[key]

    def _take_away(self, module: LoraModule, key: str) -> None:
        if module.num_experts:
            self._twin.experts[module.name.rpartition(".")[0]].adapters.pop(key, None)
            return
        wrapped = self._twin.submodule(module.name)
        if not isinstance(wrapped, LoraLinear):  # it could not be wrapped
            return
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
        """From now on the adapter `key` is active in this layer, and no other; None: the base alone."""
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
        with torch.device("meta"):  # PEFT makes tensors and draws first values, which are replaced at once
            if isinstance(module, LoraLinear):
                module.update_layer(key, config.r, lora_alpha=config.lora_alpha, config=config)
            else:
                module = LoraLinear(module, key, config, r=config.r, lora_alpha=config.lora_alpha)
                self._twin.replace(name, module)
        # PEFT gives adapters the base's dtype; masters are float32 whatever the base is.
        module.lora_A[key].weight = a
        module.lora_B[key].weight = b
        module.set_adapter([])
        module.eval()


def initial_values(module: LoraModule, rank: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(A, B) in float32. A: Kaiming-uniform with a = sqrt(5), as PEFT: uniform in ±1/sqrt(in). B: zero.

    A depends on `seed` and the module's name alone. May be called on any thread.
    """
    digest = hashlib.sha256(f"{seed}:{module.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    stack = (module.num_experts,) if module.num_experts else ()
    a = torch.empty(*stack, rank, module.in_features)
    bound = 1 / math.sqrt(module.in_features)
    a.uniform_(-bound, bound, generator=generator)
    return a, torch.zeros(*stack, module.out_features, rank)
