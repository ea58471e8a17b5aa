"""The probe before serving: one forward pass with an adapter, over a few fixed tokens, must be finite.

Finite weights are not enough: an adapter full of 3e38 passes every check of the file, yet its first request computes
infinity. The pass runs through the training twin, which computes the same as serving, in slices of one layer, so that
streams do not stall. The probe's tokens reach only some of the experts; an overflow elsewhere is found when serving.
Adapters whose elements are too small for an overflow need no pass (`bounds.py`), which covers every expert.

The experts read their A and B where these lie: converting a layer's would take a second for an adapter of gigabytes.
Only float16 is converted, in slices of `SLICE_ELEMENTS`.

Shapes: T probe tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator
from dataclasses import replace

import torch

from kt_runtime import device
from kt_runtime.adapters import AdapterTensors, LoraPair
from kt_runtime.adapters.tensors import Contents, allocated
from kt_runtime.errors import AdapterError, NumericsError
from kt_runtime.families import LoraModule
from kt_runtime.families.base import Config
from kt_runtime.resident.publishing.bounds import Bounds
from kt_runtime.resident.scheduler import Slice, Slices, run_at_once
from kt_runtime.resident.training.losses import log_softmax
from kt_runtime.resident.training.portions import SLICE_ELEMENTS
from kt_runtime.resident.twin.attention import Positions
from kt_runtime.resident.twin.lora import LoraModules
from kt_runtime.resident.twin.model import Twin

NUM_TOKENS = 8
KEY = "probe"
OPENING = Slice("probe start", NUM_TOKENS)


class Probe:
    """`lora`: the instance that all sessions share, since it tracks the active adapter of each layer."""

    def __init__(self, twin: Twin, lora: LoraModules, config: Config) -> None:
        self._twin, self._lora = twin, lora
        self._modules = {module.name: module for module in twin.family.lora_modules(config)}
        self._bounds = Bounds(twin, config)

    def is_needless(self, adapter: AdapterTensors, contents: Contents) -> bool:
        """Whether the pass can't overflow (`bounds.py`). `contents`: of every tensor of `adapter`."""
        return self._bounds.exclude_overflow(adapter, contents)

    def slices(self, adapter: AdapterTensors, where: str) -> Slices:
        """Returns None if the pass is finite, else raises AdapterError, which names `where` and the layer at fault.

        No slice has `may_switch`: else the pass would wait for another session's microbatch at each layer.
        """
        by_layer = self._by_layer(adapter)
        hidden = self._twin.embed(self._tokens())
        positions = self._twin.positions(hidden)
        for layer in range(self._twin.num_layers):
            of_layer = by_layer.get(layer)
            if of_layer is not None:
                of_layer = yield from self._readable(of_layer)
            yield Slice("probe layer", NUM_TOKENS, alike=self._twin.num_layers - layer)
            try:
                hidden = self._run_layer(layer, hidden, positions, of_layer)
            except NumericsError as error:
                raise _not_finite(where, f"layer {layer}", f" ({error})") from None
            if not torch.isfinite(hidden).all():
                raise _not_finite(where, f"layer {layer}")
        yield Slice("probe head", NUM_TOKENS)
        logits, _ = log_softmax(self._twin.final_norm(hidden[0, -1:]), self._twin.head)
        if not torch.isfinite(logits).all():
            raise _not_finite(where, "the logits")

    def _by_layer(self, adapter: AdapterTensors) -> dict[int, AdapterTensors]:
        pairs: dict[int, dict[str, tuple[torch.Tensor, torch.Tensor]]] = defaultdict(dict)
        for name, pair in adapter.modules.items():
            pairs[self._modules[name].layer][name] = pair
        return {
            layer: AdapterTensors.from_modules(adapter.rank, adapter.alpha, found) for layer, found in pairs.items()
        }

    def _readable(self, adapter: AdapterTensors) -> Generator[Slice, None, AdapterTensors]:
        """`adapter`, with the float16 tensors of routed experts in float32."""
        modules = dict(adapter.modules)
        for name, pair in adapter.modules.items():
            if self._modules[name].num_experts and torch.float16 in (pair.a.dtype, pair.b.dtype):
                modules[name] = LoraPair((yield from _in_float32(pair.a)), (yield from _in_float32(pair.b)))
        return replace(adapter, modules=modules)

    def _tokens(self) -> torch.Tensor:
        """[1, T] token ids, spread evenly over the vocabulary, the same for every adapter of a model."""
        vocabulary = self._twin.vocabulary
        ids = [(2 * index + 1) * vocabulary // (2 * NUM_TOKENS) for index in range(NUM_TOKENS)]
        return torch.tensor([ids], device=self._twin.device)

    def _run_layer(
        self, layer: int, hidden: torch.Tensor, positions: Positions, adapter: AdapterTensors | None
    ) -> torch.Tensor:
        """[1, T, H] -> [1, T, H]. The adapter is in the twin during this call only."""
        if adapter is None:
            self._lora.select(layer, None, dropout=False)
            return self._twin.run_layer(layer, hidden, positions)
        modules: list[LoraModule] = [self._modules[name] for name in adapter.modules]
        on_host = device.is_host(self._twin.device)
        run_at_once(self._lora.create_frozen(KEY, adapter, modules, experts_as_they_are=on_host))
        try:
            self._lora.select(layer, KEY, dropout=False)
            return self._twin.run_layer(layer, hidden, positions)
        finally:
            self._lora.select(layer, None, dropout=False)
            self._lora.remove(KEY)


def _in_float32(tensor: torch.Tensor) -> Generator[Slice, None, torch.Tensor]:
    """[E, ...], some experts in a slice."""
    converted = allocated({"all": tensor.shape}, torch.float32)["all"]
    at_once = max(1, SLICE_ELEMENTS // tensor[0].numel())
    for first in range(0, len(tensor), at_once):
        yield Slice("probe conversion", at_once * tensor[0].numel())
        converted[first : first + at_once].copy_(tensor[first : first + at_once])
    return converted


def _not_finite(where: str, place: str, detail: str = "") -> AdapterError:
    return AdapterError(
        f"{where}: its forward pass is not finite: NaN or Inf from {place} on{detail}. It is not served: its "
        "weights are finite, but too large for this model; lower the learning rate, or lora_alpha"
    )
