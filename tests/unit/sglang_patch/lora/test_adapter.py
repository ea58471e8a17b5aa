from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from reference import lora

from kt_runtime.adapters import AdapterTensors, LoraPair
from kt_runtime.errors import AdapterError, UnknownNameError
from kt_runtime.families import family_for
from kt_runtime.sglang_patch.lora.adapter import InstalledAdapter, build_adapter

Q = "model.layers.0.self_attn.q_proj"
GATE = "model.layers.0.mlp.experts.gate_proj"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    from kt_runtime.serve.models.make_model import make_model

    directory: Path = tmp_path_factory.mktemp("model") / "qwen"
    make_model("tiny-qwen3-moe", directory, seed=0)
    return json.loads((directory / "config.json").read_text(encoding="utf-8"))


def build(config: dict[str, Any], adapter: AdapterTensors, dtype: torch.dtype = torch.float32) -> InstalledAdapter:
    return build_adapter("id", adapter, family_for(config).lora_modules(config), dtype)


def pairs_of(adapter: InstalledAdapter) -> list[LoraPair]:
    return [part.pair for parts in adapter.weights.values() for part in parts if part.pair is not None]


def test_parts_are_stacked_in_sglangs_order(config: dict[str, Any], reference: ModuleType) -> None:
    adapter = reference.random_adapter(config, rank=2, alpha=4.0, seed=0)
    parts = build(config, adapter).weights["qkv_proj", 1]
    fused = lora.joined(parts)
    pairs = [adapter.modules[f"model.layers.1.self_attn.{name}_proj"] for name in "qkv"]
    assert torch.equal(fused.a, torch.cat([pair.a for pair in pairs]))
    assert torch.equal(fused.b, torch.cat([pair.b for pair in pairs]))
    assert [part.num_rows for part in parts] == [len(pair.b) for pair in pairs]


def test_experts_stay_stacked(config: dict[str, Any], reference: ModuleType) -> None:
    adapter = reference.random_adapter(config, rank=2, alpha=4.0, seed=0)
    built = build(config, adapter)
    prefix = "model.layers.2.mlp.experts."
    experts = {name.removeprefix(prefix): pair for name, pair in adapter.modules.items() if name.startswith(prefix)}
    both, down = (lora.joined(built.weights[f"{name}_proj_moe", 2]) for name in ("gate_up", "down"))
    assert torch.equal(both.a, torch.cat([experts["gate_proj"].a, experts["up_proj"].a], dim=1))
    assert torch.equal(both.b, torch.cat([experts["gate_proj"].b, experts["up_proj"].b], dim=1))
    assert torch.equal(down.a, experts["down_proj"].a)
    assert built.adapts_experts


def test_a_missing_part_changes_nothing(config: dict[str, Any], reference: ModuleType) -> None:
    adapter = reference.random_adapter(config, rank=2, alpha=4.0, seed=0, only=["v_proj"])
    fused = lora.joined(build(config, adapter).weights["qkv_proj", 0])
    pair = adapter.modules["model.layers.0.self_attn.v_proj"]
    assert not fused.a[:4].any()
    assert not fused.b[: -pair.b.shape[0]].any()
    assert torch.equal(fused.a[4:], pair.a)


def test_only_what_is_adapted_is_kept(config: dict[str, Any], reference: ModuleType) -> None:
    built = build(config, reference.random_adapter(config, rank=2, alpha=4.0, seed=0, only=["o_proj"]))
    assert {name for name, _ in built.weights} == {"o_proj"}
    assert not built.adapts_experts


def test_tensors_of_another_dtype_are_converted(config: dict[str, Any], reference: ModuleType) -> None:
    """Into copies: the adapter's own may change."""
    adapter = reference.random_adapter(config, rank=2, alpha=4.0, seed=0)
    built = build(config, adapter, torch.bfloat16)
    for name, key in (("self_attn.o_proj", "o_proj"), ("mlp.experts.down_proj", "down_proj_moe")):
        a, b = adapter.modules[f"model.layers.0.{name}"]
        before = a.to(torch.bfloat16), b.to(torch.bfloat16)
        a.zero_(), b.zero_()
        assert all(map(torch.equal, lora.joined(built.weights[key, 0]), before)) and before[0].any()
    assert {tensor.dtype for pair in pairs_of(built) for tensor in pair} == {torch.bfloat16}


def test_tensors_of_the_servers_dtype_are_not_copied(config: dict[str, Any], reference: ModuleType) -> None:
    """An adapter of gigabytes is in memory once, beside its slot."""
    adapter = reference.random_adapter(config, rank=2, alpha=4.0, seed=0)
    expected = {tensor.data_ptr() for pair in adapter.modules.values() for tensor in pair}
    assert {tensor.data_ptr() for pair in pairs_of(build(config, adapter)) for tensor in pair} == expected


def test_scaling_is_alpha_by_rank(config: dict[str, Any], reference: ModuleType) -> None:
    assert build(config, reference.random_adapter(config, rank=4, alpha=6.0, seed=0)).scaling == 1.5


def test_an_unknown_module_is_refused_by_name(config: dict[str, Any]) -> None:
    adapter = AdapterTensors.from_modules(2, 4.0, {"model.layers.9.nothing": (torch.ones(2, 4), torch.ones(4, 2))})
    with pytest.raises(UnknownNameError, match=r"model\.layers\.9\.nothing"):
        build(config, adapter)


@pytest.mark.parametrize("wrong", ["rank", "experts", "broadcast"])
def test_a_wrong_shape_is_refused_by_name(config: dict[str, Any], reference: ModuleType, wrong: str) -> None:
    adapter = reference.random_adapter(config, rank=2, alpha=4.0, seed=0)
    name = GATE if wrong == "experts" else Q
    a, b = adapter.modules[name]
    shapes = {"rank": (a[:1], b[:, :1]), "experts": (a[:1], b[:1]), "broadcast": (a[..., :1], b)}
    modules = {**adapter.modules, name: LoraPair(*shapes[wrong])}
    with pytest.raises(AdapterError, match=name.replace(".", r"\.")):
        build(config, AdapterTensors.from_modules(2, 4.0, modules))
