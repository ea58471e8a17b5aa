"""The experts of all MoE layers of one checkpoint, loaded once."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, TypeVar

from kt_runtime import _experts
from kt_runtime.errors import ConflictError, InvalidValueError, UnknownNameError
from kt_runtime.experts.checkpoint import open_checkpoint
from kt_runtime.experts.formats import joined_format, requested_format
from kt_runtime.experts.layer import ExpertLayer
from kt_runtime.experts.machine import placement_refusal
from kt_runtime.experts.native import resolve_isa, translated_errors
from kt_runtime.experts.values import ExpertShape
from kt_runtime.families.stack import ACTIVATIONS, ExpertMlp

logger = logging.getLogger(__name__)

NUM_PROJECTIONS = 3  # gate, up, down
PLAIN = ExpertMlp()

_T = TypeVar("_T")
_R = TypeVar("_R")


class Each(Protocol):
    """The built-in `map`, or an executor's `map`, which distributes the work over threads."""

    def __call__(self, function: Callable[[_T], _R], items: Iterable[_T], /) -> Iterable[_R]: ...


def available_isas() -> list[str]:
    """Instruction sets with kernels that this machine can run, best first; the last is always "portable"."""
    return _experts.available_isas()


_warned = False


def _warn_of_refused_placement() -> None:
    """Warns once per process. A refusal does not change results, it only slows machines with several memory nodes."""
    global _warned
    refusal = placement_refusal()
    if refusal is not None and not _warned:
        _warned = True
        logger.warning("expert weights may lie on another memory node than their threads: %s", refusal)


def joined_fingerprint(shape: ExpertShape, digests: Iterable[bytes]) -> str:
    """`ExpertStore.fingerprint` of a store with all experts. `digests`: as of `ExpertStore.digests`."""
    digest = hashlib.sha256(f"kt packed v3 {shape}".encode())
    for found in digests:
        digest.update(found)
    return digest.hexdigest()


class ExpertStore:
    """Owns the packed weights, which never change. `layers` maps the model's layer index to its ExpertLayer.

    `format`: the weights' format (formats.py); several formats are joined by "+". `weight_bytes`: size of the weights
    (codes, scales and zero points) in that format without padding, as in a checkpoint. `resident_bytes`: size in
    memory, packed and padded. `node_bytes`: `resident_bytes` on each memory node.

    `first_expert`: of a store that holds a part of each layer's experts (`kt_runtime.ranks`), the model's number of its
    expert 0. `shape.num_experts` counts the store's own.
    """

    def __init__(
        self,
        layers: Mapping[int, ExpertLayer],
        shape: ExpertShape,
        isa: str,
        num_threads: int,
        first_expert: int = 0,
    ) -> None:
        self._layers = dict(layers)
        self.layers: Mapping[int, ExpertLayer] = MappingProxyType(self._layers)
        self.shape = shape
        self.isa = isa
        self.num_threads = num_threads
        self.first_expert = first_expert
        self._closed = False
        self._fingerprint: str | None = None
        natives = [layer.native() for layer in self._layers.values()]
        self.format = joined_format(native.format for native in natives)
        self.weight_bytes = sum(native.weight_bytes for native in natives)
        self.resident_bytes = sum(native.resident_bytes for native in natives)
        self.node_bytes = [sum(parts) for parts in zip(*(native.node_bytes for native in natives), strict=True)]

    @classmethod
    def load(
        cls,
        directory: Path,
        layer_keys: Mapping[int, str],
        shape: ExpertShape,
        *,
        isa: str | None = None,
        num_threads: int | None = None,
        expert_format: str | None = None,
        num_nodes: int | None = None,
        progress: Callable[[int, int], None] | None = None,
        rename: Callable[[str], str] | None = None,
        mlp: ExpertMlp = PLAIN,
        share: range | None = None,
    ) -> ExpertStore:
        """Reads the experts from a Hugging Face checkpoint directory, one layer at a time.

        The format is detected from the tensors and config.json's quantization_config: bfloat16, fp8 e4m3 in blocks of
        128 x 128 (DeepSeek), compressed-tensors (pack-quantized, int-quantized, float-quantized), GPTQ, AWQ. float16
        and float32 are rounded to bfloat16 while they are read.

        layer_keys: layer index -> prefix such as "model.layers.3.mlp.experts"; "blk.3" in a GGUF model. Under the
        prefix are either tensors per expert (`.E.gate_proj.weight`, ...), or, unquantized and in fp8, the fused
        `.gate_up_proj` [E, 2I, H] and `.down_proj` [E, H, I], or GGUF's three (csrc/weights/gguf_layer.h); biases are
        `.E.gate_proj.bias`, ... or `.gate_up_proj_bias` [E, 2I] and `.down_proj_bias` [E, H]. Experts without a gate
        have `.up_proj` in place of `.gate_up_proj`.
        isa: one of available_isas(), None for the best. num_threads: None for machine.default_threads().
        expert_format: "int8" or "int4" quantizes a bfloat16 or fp8 checkpoint while loading; None keeps its format.
        num_nodes: number of memory nodes among which each matrix is split, None for those of the machine.
        progress: called with (layers loaded, total layers) after each layer.
        rename: the name under which `layer_keys` finds a tensor of the files, None for its own (`Family.our_name`).
        mlp: what the experts compute, and which rows of fused tensors are whose (`Family.expert_mlp`).
        share: the experts of each layer that are read and held, consecutive ones; None: all `shape.num_experts`. Not
        of a GGUF model.

        NotFoundError: no checkpoint there. CheckpointError: broken file, missing tensor, wrong shape or dtype, an
        unknown or contradictory format, NaN or Inf. UnknownNameError: an instruction set that is not available, an
        unknown expert_format or activation. InvalidValueError: a shape, thread or node count, an activation's limit
        or alpha; an expert_format for a checkpoint that is integer already.
        """
        isa = resolve_isa(isa)
        wanted = requested_format(expert_format)
        if mlp.activation not in ACTIVATIONS:
            raise UnknownNameError("activation of experts", mlp.activation, ACTIVATIONS)
        fields = (mlp.activation, mlp.limit or 0.0, mlp.alpha or 0.0, mlp.has_bias)
        described = (*fields, mlp.is_interleaved, mlp.is_transposed)
        if num_threads is None:
            num_threads = _experts.default_num_threads()
        for name, value in (("num_threads", num_threads), ("num_nodes", num_nodes)):
            if value is not None and value < 1:
                raise InvalidValueError(f"{name} is {value}; allowed: 1 or more")
        first, held = (0, shape.num_experts) if share is None else (share.start, len(share))
        own_shape = replace(shape, num_experts=held)
        layers: dict[int, ExpertLayer] = {}
        checkpoint = open_checkpoint(directory, rename)
        with translated_errors():
            for index, prefix in layer_keys.items():
                native = _experts.load_layer(
                    checkpoint=checkpoint,
                    prefix=prefix,
                    num_experts=shape.num_experts,
                    hidden=shape.hidden,
                    intermediate=shape.intermediate,
                    mlp=described,
                    isa=isa,
                    num_threads=num_threads,
                    expert_format=wanted,
                    num_nodes=num_nodes or 0,
                    share=(first, held),
                )
                layers[index] = ExpertLayer(native, own_shape, mlp)
                if progress is not None:
                    progress(len(layers), len(layer_keys))
        _warn_of_refused_placement()
        return cls(layers, own_shape, isa, num_threads, first)

    def fingerprint(self, *, fresh: bool = False, each: Each = map) -> str:
        """sha256, in hex, of format, shape, activation, packed weights and biases of all layers. Cached; `fresh`
        recomputes the hash.

        Independent of instruction set and number of memory nodes. `each` maps the hash function over the experts.
        """
        if self._fingerprint is None or fresh:
            self._fingerprint = joined_fingerprint(self.shape, self.digests(each))
        return self._fingerprint

    def digests(self, each: Each = map) -> list[bytes]:
        """sha256 of each expert: of the first layer's in their order, then of the next one's. `each` as above."""
        if self._closed:
            raise ConflictError("the expert store is closed")
        experts = [(index, expert) for index in sorted(self._layers) for expert in range(self.shape.num_experts)]
        return list(each(self._digest, experts))

    def _digest(self, place: tuple[int, int]) -> bytes:
        index, expert = place
        layer = self._layers[index]
        native, mlp = layer.native(), layer.mlp
        digest = hashlib.sha256(f"layer {index} expert {self.first_expert + expert} {native.format};".encode())
        for projection in range(NUM_PROJECTIONS):
            for node in range(native.num_nodes):
                digest.update(native.piece_bytes(expert, projection, node))
        if not mlp.is_plain:
            digest.update(f"{mlp.activation} {mlp.limit} {mlp.alpha};".encode())
            digest.update(native.bias_bytes(expert))
        return digest.digest()

    def close(self) -> None:
        """Frees the weights. Later calls on the layers raise ConflictError; closing twice is allowed."""
        self._closed = True
        for layer in self._layers.values():
            layer.close()
