"""A rank's part of an adapter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import lora
from reference.families import PRESETS

from kt_runtime.adapters import LoraPair
from kt_runtime.families import family_for
from kt_runtime.ranks import Share
from kt_runtime.serve.models.make_model import make_model
from kt_runtime.sglang_patch.lora.adapter import InstalledAdapter, build_adapter
from kt_runtime.sglang_patch.lora.rank_part import part_of


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory: Path = tmp_path_factory.mktemp("model") / "qwen"
    make_model("tiny-qwen3-moe", directory, seed=0)
    found: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return found


def test_b_is_split_by_outputs_part_by_part_and_experts_by_expert(config: dict[str, Any]) -> None:
    modules = family_for(config).lora_modules(config)
    adapter = lora.random_adapter(config, rank=2, alpha=4.0, seed=0)
    whole = build_adapter("id", adapter, modules, torch.float32)
    halves = [part_of(whole, modules, Share(rank, 2)) for rank in range(2)]
    heads, kv_heads, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]

    def fused(adapter: InstalledAdapter, name: str, layer: int) -> LoraPair:
        return lora.joined(adapter.weights[name, layer])

    for layer in range(config["num_hidden_layers"]):
        qkv = [fused(half, "qkv_proj", layer) for half in halves]
        parts = [half.b.split([heads * size // 2, kv_heads * size // 2, kv_heads * size // 2]) for half in qkv]
        joined = torch.cat([torch.cat(pair) for pair in zip(*parts, strict=True)])
        assert torch.equal(joined, fused(whole, "qkv_proj", layer).b)
        for name in ("qkv_proj", "o_proj"):
            assert all(torch.equal(fused(half, name, layer).a, fused(whole, name, layer).a) for half in halves)
        output = torch.cat([fused(half, "o_proj", layer).b for half in halves])
        assert torch.equal(output, fused(whole, "o_proj", layer).b)
        for name in ("gate_up_proj_moe", "down_proj_moe"):
            for matrix in ("a", "b"):
                experts = torch.cat([getattr(fused(half, name, layer), matrix) for half in halves])
                assert torch.equal(experts, getattr(fused(whole, name, layer), matrix))
    assert halves[0].scaling == whole.scaling and halves[0].adapts_experts


def test_a_rank_s_part_keeps_nothing_of_the_whole_adapter(config: dict[str, Any]) -> None:
    """All tensors of a file may be views of one memory."""
    modules = family_for(config).lora_modules(config)
    adapter = lora.random_adapter(config, rank=2, alpha=4.0, seed=0)
    part = part_of(build_adapter("id", adapter, modules, torch.float32), modules, Share(0, 2))
    whole = {tensor.untyped_storage().data_ptr() for pair in adapter.modules.values() for tensor in pair}
    pairs = [each.pair for parts in part.weights.values() for each in parts if each.pair is not None]
    assert pairs and not whole & {tensor.untyped_storage().data_ptr() for pair in pairs for tensor in pair}


@pytest.mark.parametrize(
    ("family", "linear", "parts"),
    [
        ("deepseek_v3", "fused_qkv_a_proj_with_mqa", 0),
        ("qwen3_next", "in_proj_qkvz", 1),
        ("qwen3_5_moe_text", "in_proj_qkvz", 4),
    ],
)
def test_b_is_whole_where_the_layer_is_and_split_by_the_kinds_of_its_outputs(
    family: str, linear: str, parts: int
) -> None:
    """Qwen3.5: queries, keys, values, gates; Qwen3-Next has them by key head; latents are not split."""
    config = dict(PRESETS[family].config)
    modules = family_for(config).lora_modules(config)
    whole = build_adapter("id", lora.random_adapter(config, rank=2, alpha=4.0, seed=0), modules, torch.float32)
    b = lora.joined(whole.weights[linear, 0]).b
    own = [lora.joined(part_of(whole, modules, Share(rank, 2)).weights[linear, 0]).b for rank in range(2)]
    if not parts:
        assert all(torch.equal(each, b) for each in own)
        return
    keys = config.get("linear_num_key_heads", 0) * config.get("linear_key_head_dim", 0)
    values = config.get("linear_num_value_heads", 0) * config.get("linear_value_head_dim", 0)
    sizes = [keys, keys, values, values] if parts == 4 else [len(b)]
    expected = zip(*(piece.chunk(2) for piece in b.split(sizes)), strict=True)
    assert all(torch.equal(each, torch.cat(pieces)) for each, pieces in zip(own, expected, strict=True))
