"""The experts of all MoE layers of one checkpoint, loaded once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from kt_runtime import _experts
from kt_runtime.errors import ConflictError, InvalidValueError
from kt_runtime.experts.layer import ExpertLayer, ExpertShape
from kt_runtime.experts.native import resolve_isa, translated_errors


def available_isas() -> list[str]:
    """Instruction sets with kernels that this machine can run, best first; the last is always "portable"."""
    return _experts.available_isas()


class ExpertStore:
    """Owns the packed weights. `layers` maps the model's layer index to its ExpertLayer; weights never change.

    `weight_bytes` is what the weights take as plain bfloat16, `resident_bytes` what they take packed, with padding.
    """

    def __init__(self, layers: Mapping[int, ExpertLayer], shape: ExpertShape, isa: str, num_threads: int) -> None:
        self._layers = dict(layers)
        self.layers: Mapping[int, ExpertLayer] = MappingProxyType(self._layers)
        self.shape = shape
        self.isa = isa
        self.num_threads = num_threads
        self._closed = False
        self._fingerprint: str | None = None
        self.weight_bytes = sum(layer.native().weight_bytes for layer in self._layers.values())
        self.resident_bytes = sum(layer.native().resident_bytes for layer in self._layers.values())

    @classmethod
    def load(
        cls,
        directory: Path,
        layer_keys: Mapping[int, str],
        shape: ExpertShape,
        *,
        isa: str | None = None,
        num_threads: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> ExpertStore:
        """Reads bf16 experts from a Hugging Face checkpoint directory, one layer at a time.

        layer_keys: layer index -> prefix such as "model.layers.3.mlp.experts". Under it, either one tensor per expert
        (`.E.gate_proj.weight`, ...) or the fused `.gate_up_proj` [E, 2I, H] and `.down_proj` [E, H, I].
        isa: one of available_isas(), None for the best. num_threads: None for all processors that the process may use.
        progress: called with (layers loaded, layers in all) after each layer.

        NotFoundError: no checkpoint there. CheckpointError: broken file, missing tensor, wrong shape or dtype, NaN or
        Inf. UnknownNameError: an instruction set that is not available. InvalidValueError: a shape or thread count.
        """
        isa = resolve_isa(isa)
        if num_threads is None:
            num_threads = _experts.default_num_threads()
        if num_threads < 1:
            raise InvalidValueError(f"num_threads is {num_threads}; allowed: 1 or more")
        layers: dict[int, ExpertLayer] = {}
        with translated_errors():
            checkpoint = _experts.open_checkpoint(str(directory))
            for index, prefix in layer_keys.items():
                sizes = (shape.num_experts, shape.hidden, shape.intermediate)
                layers[index] = ExpertLayer(_experts.load_layer(checkpoint, prefix, *sizes, isa, num_threads), shape)
                if progress is not None:
                    progress(len(layers), len(layer_keys))
        return cls(layers, shape, isa, num_threads)

    def fingerprint(self, *, fresh: bool = False) -> str:
        """sha256, in hex, of the packed bytes of all layers. Computed once, or anew when `fresh`."""
        if self._closed:
            raise ConflictError("the expert store is closed")
        if self._fingerprint is None or fresh:
            digest = hashlib.sha256(f"kt packed bf16 v1 {self.shape}".encode())
            for index, layer in sorted(self._layers.items()):
                digest.update(f"layer {index}".encode())
                digest.update(memoryview(layer.native()))
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def close(self) -> None:
        """Frees the weights. Later calls on its layers raise ConflictError; closing twice is fine."""
        self._closed = True
        for layer in self._layers.values():
            layer.close()
