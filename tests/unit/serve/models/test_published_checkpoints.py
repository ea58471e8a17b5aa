"""Checkpoints with the published ones' tensor names and shards, in small: what is loaded is what the files hold."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from reference.checkpoints.published import PUBLISHED, Written, write
from torch.nn import functional

from kt_runtime.experts import ExpertShape, ExpertStore
from kt_runtime.families import FAMILIES
from kt_runtime.families.wrapped import is_left_out
from kt_runtime.serve.models.presets import load_preset, preset_names
from kt_runtime.serve.models.report import ResolvedModel, resolve_model
from kt_runtime.sglang_patch.cpu.weights import dense_tensors

TOLERANCE = 4e-6  # of the expert's largest output, in float32; 1.04e-6 measured


@pytest.fixture(params=PUBLISHED)
def written(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Written]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield write(request.param, tmp_path / "model")


def test_every_family_has_a_published_checkpoint_here() -> None:
    on_the_hub = {name for name in preset_names() if load_preset(name).hub_ids}
    assert PUBLISHED.keys() <= on_the_hub
    named = {load_preset(name).config["architectures"][0] for name in PUBLISHED}
    assert named == {architecture for family in FAMILIES for architecture in family.architectures}
    assert all(layout["source"] for layout in PUBLISHED.values())


def expert_of(written: Written, layer: int, expert: int) -> tuple[torch.Tensor, ...]:
    """gate, up and down, by any of the published names. Llama 4's fused ones are transposed."""
    found = {}
    parent = next(
        iter(name.rpartition(".")[0] for name in written.values if f"layers.{layer}." in name and ".experts." in name)
    )
    if f"{parent}.gate_up_proj" in written.values:
        both, down = (written.values[f"{parent}.{name}"][expert] for name in ("gate_up_proj", "down_proj"))
        if parent.endswith("feed_forward.experts"):
            both, down = both.T, down.T
        return (*both.chunk(2), down)
    for name, tensor in written.values.items():
        if name.startswith(f"model.layers.{layer}.") and f".experts.{expert}." in name:
            found[name.split(".")[-2]] = tensor
    names = ("gate_proj", "up_proj", "down_proj") if "gate_proj" in found else ("w1", "w3", "w2")
    return tuple(found[name] for name in names)


def gpt_oss_output(written: Written, layer: int, expert: int, x: torch.Tensor) -> torch.Tensor:
    """[1, H] -> [1, H], from fused tensors whose rows are gate's and up's in turn."""
    prefix = f"model.layers.{layer}.mlp.experts"
    both, down, both_bias, down_bias = (
        written.values[f"{prefix}.{name}"][expert]
        for name in ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
    )
    made = x @ both.T + both_bias
    gate, up = made[:, 0::2].clamp(max=7.0), made[:, 1::2].clamp(-7.0, 7.0)
    return (gate * torch.sigmoid(1.702 * gate) * (up + 1)) @ down.T + down_bias


def output_of(written: Written, layer: int, expert: int, x: torch.Tensor) -> torch.Tensor:
    if any(name.endswith("experts.down_proj_bias") for name in written.values):
        return gpt_oss_output(written, layer, expert, x)
    gate, up, down = expert_of(written, layer, expert)
    return (functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def check_experts(written: Written, model: ResolvedModel) -> None:
    family, config = model.family, model.config
    keys = {layer: family.expert_prefix(layer) for layer in family.moe_layers(config)}
    shape = ExpertShape(*family.expert_shape(config))
    mlp = family.expert_mlp(config)
    store = ExpertStore.load(model.directory, keys, shape, num_threads=1, rename=family.our_name, mlp=mlp)
    try:
        x = torch.randn(1, shape.hidden, generator=torch.Generator().manual_seed(1))
        for layer in keys:
            for expert in range(shape.num_experts):
                expected = output_of(written, layer, expert, x)
                found = store.layers[layer].forward(x, torch.tensor([[expert]]), torch.ones(1, 1))
                assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max(), (layer, expert)
    finally:
        store.close()


def test_what_is_loaded_is_what_the_files_hold(written: Written, caplog: pytest.LogCaptureFixture) -> None:
    model = resolve_model(str(written.directory))
    files = sorted(str(path) for path in model.directory.glob("*.safetensors"))
    with caplog.at_level(logging.INFO):
        found = dict(dense_tensors(files, torch.float32, model.config))
    dense = {name: tensor for name, tensor in written.values.items() if ".experts." not in name}
    computed = {name for name in found if name.endswith("rotary_emb.inv_freq")}  # SGLang computes them itself
    assert found.keys() - computed == dense.keys()
    assert all(torch.equal(found[name].float(), tensor) for name, tensor in dense.items())
    assert ("(MTP) is not served" in caplog.text) == any(
        "eh_proj" in name or name.startswith("mtp.") for name in written.left_out
    )
    assert ("images and videos are not served" in caplog.text) == any(map(is_left_out, written.left_out))
    check_experts(written, model)


def test_layers_lie_across_files(written: Written) -> None:
    layer_of = re.compile(r"layers\.(\d+)\.")
    files: dict[str, set[str]] = {}
    for shard, names in written.shards.items():
        for found in filter(None, map(layer_of.search, names)):
            files.setdefault(found[1], set()).add(shard)
    assert any(len(shards) > 1 for shards in files.values())
