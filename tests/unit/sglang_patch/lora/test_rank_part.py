"""A rank's part of an adapter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import lora

from kt_runtime.families import family_for
from kt_runtime.ranks import Share
from kt_runtime.serve.models.make_model import make_model
from kt_runtime.sglang_patch.lora.adapter import build_adapter
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
    for layer in range(config["num_hidden_layers"]):
        qkv = [half.weights["qkv_proj", layer] for half in halves]
        parts = [half.b.split([heads * size // 2, kv_heads * size // 2, kv_heads * size // 2]) for half in qkv]
        joined = torch.cat([torch.cat(pair) for pair in zip(*parts, strict=True)])
        assert torch.equal(joined, whole.weights["qkv_proj", layer].b)
        for name in ("qkv_proj", "o_proj"):
            assert all(torch.equal(half.weights[name, layer].a, whole.weights[name, layer].a) for half in halves)
        output = torch.cat([half.weights["o_proj", layer].b for half in halves])
        assert torch.equal(output, whole.weights["o_proj", layer].b)
        for name in ("gate_up_proj_moe", "down_proj_moe"):
            for matrix in ("a", "b"):
                experts = torch.cat([getattr(half.weights[name, layer], matrix) for half in halves])
                assert torch.equal(experts, getattr(whole.weights[name, layer], matrix))
    assert halves[0].scaling == whole.scaling and halves[0].adapts_experts
