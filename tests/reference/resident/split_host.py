"""Makes a host with a whole model that of one rank, with a rank's part of the tensors and of the experts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kt_runtime.experts import ExpertShape, ExpertStore
from kt_runtime.families import family_for
from kt_runtime.families.models.qwen3_next import Qwen3Next
from kt_runtime.ranks import Exchange, Pieces, Share


def split_host(host: Any, exchange: Exchange, expert_format: str | None = None) -> Any:
    """`host`: a `FakeHost`, which becomes that of `exchange`'s rank. Returns it."""
    host.exchange, host.num_ranks = exchange, exchange.share.num_ranks
    host._tensors = own_tensors(host.config, host.tensors(), exchange.share)
    host.experts = store_of(host, exchange.share, expert_format)
    return host


def store_of(host: Any, share: Share | None, expert_format: str | None) -> ExpertStore:
    family = family_for(host.config)
    shape = ExpertShape(*family.expert_shape(host.config))
    return ExpertStore.load(
        Path(host.model_directory),
        {layer: family.expert_prefix(layer) for layer in family.moe_layers(host.config)},
        shape,
        num_threads=1,
        expert_format=expert_format,
        rename=family.our_name,
        mlp=family.expert_mlp(host.config),
        share=None if share is None else share.of(shape.num_experts, "experts"),
    )


def own_tensors(config: Mapping[str, Any], whole: Mapping[str, torch.Tensor], share: Share) -> dict[str, torch.Tensor]:
    """As SGLang and `sglang_patch.ranks` split them: each part of a fused layer by rows, its bias and sinks too, the
    padded vocabulary by rows; norms, router, indexer and rotary table are whole on every rank."""
    own = dict(whole)
    for name, sizes in split_rows(config).items():
        own[name] = Pieces(share, tuple(sizes)).own(whole[name], 0).clone()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows_of_all = share.of(len(whole[name]), "rows of the vocabulary")
        own[name] = whole[name][rows_of_all.start : rows_of_all.stop].clone()
    return own


def split_rows(config: Mapping[str, Any]) -> dict[str, list[int]]:
    """Of each of the engine's tensors that ranks split: the rows of each part that is split by itself, in order."""
    family = family_for(config)
    modules = {module.name: module for module in family.lora_modules(config)}
    found: dict[str, list[int]] = {}
    for source in sorted(family.twin_sources(config), key=lambda source: source.start):
        module, size = modules.get(source.name.rpartition(".")[0]), source.stop - source.start
        if source.name.endswith("conv1d.weight"):
            assert isinstance(family, Qwen3Next)
            key_heads, value_heads, key_size, value_size = family.delta_sizes(config)
            found[source.source] = [key_heads * key_size, key_heads * key_size, value_heads * value_size]
        elif source.name.endswith((".sinks", ".A_log", ".dt_bias")):
            found[source.source] = [size]
        elif module is not None and not module.is_whole:
            found.setdefault(source.source, []).extend(module.pieces or (size,))
    return found
