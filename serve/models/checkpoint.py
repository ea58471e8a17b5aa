"""The tensors of a config's checkpoint, under the names that the hub uses.

Names are transformers' (`Family.our_name`). Published checkpoints store routed experts as one matrix per expert and
projection (`model.layers.1.mlp.experts.0.gate_proj.weight`), though transformers 5 and SGLang fuse them in memory;
transformers 5 can also write them fused. Every other tensor has the name of its Hugging Face parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import msgspec

from kt_runtime.families.registry import family_for

BF16_BYTES = 2


class CheckpointTensor(msgspec.Struct, frozen=True):  # a model has 50,000, and a dataclass is 16 times as slow to make
    """`dtype`: BF16, or F32 for the router's correction bias, as safetensors spells them. Matrices are [out, in], or,
    `is_transposed`, [in, out]. `is_offset`: of a norm that multiplies by one more than its weight."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "BF16"
    is_routed_expert: bool = False
    is_transposed: bool = False
    is_offset: bool = False

    @property
    def matrix(self) -> tuple[int, int]:
        """(out, in)."""
        rows, cols = self.shape[-2:]
        return (cols, rows) if self.is_transposed else (rows, cols)

    @property
    def num_parameters(self) -> int:
        return prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.num_parameters * (4 if self.dtype == "F32" else BF16_BYTES)


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """`active`: the parameters that one token's forward pass reads, embedding and head included."""

    total: int
    active: int
    dense: int
    routed: int


def checkpoint_tensors(config: Mapping[str, Any]) -> Iterator[CheckpointTensor]:
    """Every tensor of the checkpoint, with a matrix per expert, or fused where the family's published ones are.

    Raises UnknownNameError for an unknown family.
    """
    family = family_for(config)
    yield from dense_tensors(config)
    for layer in family.moe_layers(config):
        yield from fused_expert_tensors(config, layer) if family.fuses_experts else expert_tensors(config, layer)


def expert_tensors(config: Mapping[str, Any], layer: int) -> Iterator[CheckpointTensor]:
    """The routed experts of a layer with a matrix for each expert and projection, as most published checkpoints have
    them."""
    family = family_for(config)
    num_experts, hidden, intermediate = family.expert_shape(config)
    for expert in range(num_experts):
        prefix = f"{family.expert_prefix(layer)}.{expert}"
        for projection in ("gate_proj", "up_proj"):
            yield CheckpointTensor(f"{prefix}.{projection}.weight", (intermediate, hidden), is_routed_expert=True)
        yield CheckpointTensor(f"{prefix}.down_proj.weight", (hidden, intermediate), is_routed_expert=True)


def fused_expert_tensors(config: Mapping[str, Any], layer: int) -> tuple[CheckpointTensor, ...]:
    """The routed experts of a layer as transformers 5 holds them: gate and up [E, 2 I, H], down [E, H, I], perhaps
    transposed; and their biases [E, 2 I] and [E, H], if they have any.
    """
    family = family_for(config)
    mlp = family.expert_mlp(config)
    num_experts, hidden, intermediate = family.expert_shape(config)
    matrices = {"gate_up_proj": (2 * intermediate, hidden), "down_proj": (hidden, intermediate)}
    tensors = []
    for projection, (rows, cols) in matrices.items():
        name = f"{family.expert_prefix(layer)}.{projection}"
        shape = (num_experts, cols, rows) if mlp.is_transposed else (num_experts, rows, cols)
        tensors.append(CheckpointTensor(name, shape, is_routed_expert=True, is_transposed=mlp.is_transposed))
        if mlp.has_bias:
            tensors.append(CheckpointTensor(f"{name}_bias", (num_experts, rows), is_routed_expert=True))
    return tuple(tensors)


def dense_tensors(config: Mapping[str, Any]) -> Iterator[CheckpointTensor]:
    """All tensors but the routed experts. A tied head is on disk once, as the embedding."""
    is_tied, family = bool(config.get("tie_word_embeddings")), family_for(config)
    for source in family.twin_sources(config):
        if not (is_tied and source.name == "lm_head.weight"):
            dtype = "F32" if source.is_buffer else "BF16"
            yield CheckpointTensor(source.name, source.shape, dtype, is_offset=family.is_offset(source.name))


def count_parameters(config: Mapping[str, Any]) -> ParameterCount:
    """Counts from shapes alone, fast even with tens of thousands of expert tensors."""
    family = family_for(config)
    dense = sum(tensor.num_parameters for tensor in dense_tensors(config))
    num_experts, hidden, intermediate = family.expert_shape(config)
    one_expert = 3 * hidden * intermediate
    if family.expert_mlp(config).has_bias:
        one_expert += 2 * intermediate + hidden
    num_moe_layers = len(family.moe_layers(config))
    routed = num_moe_layers * num_experts * one_expert
    active = dense + num_moe_layers * family.num_experts_per_tok(config) * one_expert
    return ParameterCount(dense + routed, active, dense, routed)


def format_count(number: int) -> str:
    """Three significant digits, such as `671B` or `0.93M`."""
    for unit, size in (("T", 10**12), ("B", 10**9)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number / 10**6:.3g}M"
