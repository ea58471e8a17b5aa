"""The native step of a model, from its family's table and the engine's tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple

import torch

from kt_runtime.errors import InvalidValueError, NotFoundError, suggestion
from kt_runtime.experts import ExpertStore
from kt_runtime.experts.dense import DTYPES
from kt_runtime.experts.step import (
    GatedDelta,
    GatedMlp,
    GroupedQuery,
    Indexer,
    Latent,
    LoraPool,
    RoutedExperts,
    Step,
    StepLayer,
    StepShare,
)
from kt_runtime.families import stack as table
from kt_runtime.ops.row_factors import temperatures

SCALARS = ("heads", "top_k", "normalises", "epsilon", "interleaved", "weighs_input", "chunk", "offset_norms")
"""Fields of `DecoderStack` that the step takes unchanged."""


def build_step(
    stack: table.DecoderStack,
    tensors: Mapping[str, torch.Tensor],
    experts: ExpertStore,
    pool: Sequence[Sequence[torch.Tensor]],
    angles: torch.Tensor,
    scaling: float,
    vocab_size: int,
    lora: LoraPool | None = None,
    share: StepShare | None = None,
) -> Step:
    """`tensors`: the engine's, by its names. `pool`: of each layer keys and values [S, K, D]; for latent attention the
    latents with their rotary keys [S, 1, latent + rope], with an indexer followed by its keys; for Gated DeltaNet the
    convolution's inputs [M, C, W - 1] and the states [M, HV, K, V] of sequences. `angles` [P, D] or [P, rope]: cosines,
    then sines of each position. `scaling`: of the queries. `vocab_size`: token ids below it are allowed; the engine may
    have padded the embedding with more rows. `lora`: the engine's LoRA pool. `share`: this rank's, of several; all
    tensors are its own then. The step's threads and instruction set are the experts'.

    NotFoundError: a tensor of the table is missing. InvalidValueError: one does not fit.
    """
    groups = stack.groups
    scalars = {
        **{name: getattr(stack, name) for name in SCALARS},
        "groups": None if groups is None else astuple(groups),
        "scaling": scaling,
    }
    if share is not None:
        scalars["heads"] = stack.heads // share.num_ranks
        scalars["vocabulary"] = vocab_size
    named = _Tensors(tensors, len(angles), 1 if share is None else share.num_ranks)
    layers = [named.layer(layer, kv, experts) for layer, kv in zip(stack.layers, pool, strict=True)]
    embedding = named[stack.embedding]
    ids = _own_ids(vocab_size, share)
    if not vocab_size >= 1 or ids > len(embedding):
        raise InvalidValueError(f"{stack.embedding} has {len(embedding)} rows; the vocabulary has {vocab_size} tokens")
    whole = {"embedding": embedding[:ids], "final_norm": named[stack.final_norm], "angles": angles}
    return Step(scalars, whole, layers, lora, share=share, isa=experts.isa, num_threads=experts.num_threads)


def _own_ids(vocab_size: int, share: StepShare | None) -> int:
    """How many rows of the embedding are those of token ids."""
    if share is None:
        return vocab_size
    return min(max(vocab_size - share.rank * share.ids_per_rank, 0), share.ids_per_rank)


class _Tensors:
    """The engine's tensors, and the step's layers made of them. `positions`, `ranks`: how many there are."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], positions: int, ranks: int) -> None:
        self._tensors, self._positions, self._ranks = tensors, positions, ranks

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._tensors:
            raise NotFoundError(f"the engine has no tensor {name!r}{suggestion(name, self._tensors)}")
        tensor = self._tensors[name]
        if tensor.dtype not in DTYPES:
            raise InvalidValueError(f"{name} is {tensor.dtype}; allowed: {' or '.join(map(str, DTYPES))}")
        return tensor.detach()

    def optional(self, name: str | None) -> torch.Tensor | None:
        return None if name is None else self[name]

    def layer(self, layer: table.StackLayer, kv: Sequence[torch.Tensor], experts: ExpertStore) -> StepLayer:
        mlp, routed = layer.mlp, layer.routed
        return StepLayer(
            input_norm=self[layer.input_norm],
            attention=self.attention(layer.attention, kv),
            post_norm=self[layer.post_norm],
            mlp=None
            if mlp is None
            else GatedMlp(gate_up=self[mlp.gate_up], down=self[mlp.down], gate=self.optional(mlp.gate)),
            routed=None if routed is None else self.routed(routed, experts),
        )

    def attention(
        self, names: table.GroupedQuery | table.Latent | table.GatedDelta, kv: Sequence[torch.Tensor]
    ) -> GroupedQuery | Latent | GatedDelta:
        if isinstance(names, table.Latent):
            return self.latent(names, *kv)
        if isinstance(names, table.GatedDelta):
            return self.gated_delta(names, *kv)
        keys, values = kv
        ones = torch.ones(keys.shape[-1], dtype=keys.dtype, device=keys.device) if names.unit_norms else None
        heat = names.temperature
        return GroupedQuery(
            qkv=self[names.qkv],
            qkv_bias=self.optional(names.qkv_bias),
            query_norm=self.optional(names.query_norm) if ones is None else ones,
            key_norm=self.optional(names.key_norm) if ones is None else ones,
            keys=keys,
            values=values,
            out=self[names.out],
            out_bias=self.optional(names.out_bias),
            sinks=None if names.sinks is None else self[names.sinks].float(),
            window=names.window,
            rotates=names.rotates,
            norms_last=names.unit_norms,
            is_chunked=names.is_chunked,
            temperatures=None if heat is None else temperatures(heat.every, heat.strength, self._positions),
            temperature_every=1 if heat is None else heat.every,
            is_gated=names.is_gated,
        )

    def gated_delta(self, names: table.GatedDelta, inputs: torch.Tensor, states: torch.Tensor) -> GatedDelta:
        return GatedDelta(
            inputs=self[names.inputs],
            gates=self[names.gates],
            filter=self[names.filter].squeeze(1),
            log_rate=self[names.log_rate],
            bias=self[names.bias],
            norm=self[names.norm],
            out=self[names.out],
            kept_inputs=inputs,
            states=states,
            key_heads=names.key_heads // self._ranks,
            by_key_head=names.by_key_head,
        )

    def latent(self, names: table.Latent, keys: torch.Tensor) -> Latent:
        return Latent(
            compress=self[names.compress],
            query_norm=self.optional(names.query_norm),
            query=self[names.query],
            latent_norm=self[names.latent_norm],
            key_heads=self[names.key_heads].mT,
            value_heads=self[names.value_heads].mT,
            keys=keys,
            out=self[names.out],
            indexer=None if names.indexer is None else self.indexer(names.indexer),
            top_k=names.seen_keys,
        )

    def indexer(self, names: table.Indexer) -> Indexer:
        return Indexer(
            query=self[names.query],
            key=self[names.key],
            norm_weight=self[names.norm_weight],
            norm_bias=self[names.norm_bias],
            weights=self[names.weights],
            interleaved=names.interleaved,
        )

    def routed(self, names: table.RoutedExperts, experts: ExpertStore) -> RoutedExperts:
        return RoutedExperts(
            gate=self[names.gate],
            bias=self.optional(names.bias),
            experts=experts.layers[names.experts],
            gate_bias=self.optional(names.gate_bias),
        )
