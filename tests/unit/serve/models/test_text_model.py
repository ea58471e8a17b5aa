"""Kimi-K2.5: the language model inside is a text model, whatever names its tensors have."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import lora
from reference.checkpoints import kimi
from reference.checkpoints.quantized_checkpoint import quantize_checkpoint
from safetensors.torch import load_file, save_file

from kt_runtime.cli.adapter.merged_checkpoint import write_merged
from kt_runtime.errors import CheckpointError
from kt_runtime.experts import ExpertShape, ExpertStore
from kt_runtime.families import FAMILIES, family_for, naming
from kt_runtime.families.quantization import quantization_of
from kt_runtime.serve.models.checkpoint_files import check_checkpoint
from kt_runtime.serve.models.make_model import make_model
from kt_runtime.serve.models.report import resolve_model
from kt_runtime.sglang_patch.cpu.weights import dense_tensors


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """The language model alone."""
    return make_model("tiny-deepseek-v3", tmp_path / "text", seed=3)


def loaded(directory: Path) -> tuple[dict[str, torch.Tensor], str]:
    """Every dense tensor that SGLang gets, and the fingerprint of the routed experts."""
    config = json.loads((directory / "config.json").read_text())
    family = family_for(config)
    keys = {layer: family.expert_prefix(layer) for layer in family.moe_layers(config)}
    shape = ExpertShape(*family.expert_shape(config))
    store = ExpertStore.load(directory, keys, shape, num_threads=1, rename=family.our_name)
    try:
        files = sorted(str(path) for path in directory.glob("*.safetensors"))
        return dict(dense_tensors(files, torch.float32, config)), store.fingerprint()
    finally:
        store.close()


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("scheme", [None, "int4_g32", "fp8"])
def test_the_language_model_is_the_one_without_the_wrapper(
    tmp_path: Path, text: Path, caplog: pytest.LogCaptureFixture, scheme: str | None
) -> None:
    """`int4_g32`: compressed-tensors on the experts alone, as K2-Thinking and K2.5 have them."""
    if scheme is not None:
        text, _ = quantize_checkpoint(text, tmp_path, scheme, experts_only=scheme == "int4_g32")
    wrapped = kimi.published(text, tmp_path / "Kimi-tiny")
    model = resolve_model(str(wrapped))
    assert (model.name, model.family.name) == ("Kimi-tiny", "deepseek_v3")
    assert model.config["architectures"] == ["DeepseekV3ForCausalLM"] and model.config["model_type"] == "kimi_k2"
    assert "vision_config" not in model.config and "auto_map" not in model.config
    assert quantization_of(model.config) == quantization_of(json.loads((text / "config.json").read_text()))
    dense, experts = loaded(text)
    with caplog.at_level(logging.INFO):
        found, found_experts = loaded(model.directory)
    assert equal(found, dense) and found_experts == experts
    said = "read past 3 tensors of the vision tower, such as mm_projector.proj.0.weight: images and videos are not"
    assert said in caplog.text


def test_a_merged_checkpoint_is_that_of_the_language_model(tmp_path: Path, text: Path) -> None:
    base = resolve_model(str(kimi.published(text, tmp_path / "wrapped")))
    adapter = lora.random_adapter(base.config, rank=4, alpha=8.0, seed=1)
    write_merged(base.directory, adapter, tmp_path / "merged")
    write_merged(text, adapter, tmp_path / "expected")
    found, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("merged", "expected"))
    assert equal(found, expected)
    assert resolve_model(str(tmp_path / "merged")).config["architectures"] == ["DeepseekV3ForCausalLM"]


def test_nvidia_s_names_are_the_same_model(tmp_path: Path, text: Path) -> None:
    wrapped = kimi.published(text, tmp_path / "wrapped")
    path = wrapped / "model.safetensors"
    renamed = {
        name.replace("language_model.model.layers.", "language_model.layers."): tensor
        for name, tensor in load_file(path).items()
    }
    save_file(renamed, path, {"format": "pt"})
    found, expected = loaded(resolve_model(str(wrapped)).directory), loaded(text)
    assert equal(found[0], expected[0]) and found[1] == expected[1]


@pytest.mark.parametrize("prefix", ["", "base_model.model."])
@pytest.mark.parametrize("name", ["model.layers.3.mlp.gate.weight", "model.norm.weight", "lm_head.weight"])
def test_every_way_to_write_a_name_is_read(prefix: str, name: str) -> None:
    inside = name.removeprefix("model.")
    ways = {f"language_model.{name}", f"language_model.{inside}"}
    ways |= {f"model.language_model.{inside}"} if name != "lm_head.weight" else set()
    for way in ways:
        assert naming.without_wrapper(prefix + way) == prefix + name
        assert all(family.our_name(prefix + way) == family.our_name(prefix + name) for family in FAMILIES)
    assert naming.without_wrapper("visual.language_model.x") == "visual.language_model.x"


def test_the_directory_is_kept_and_made_anew_when_the_checkpoint_changes(tmp_path: Path, text: Path) -> None:
    wrapped = kimi.published(text, tmp_path / "wrapped")
    first = resolve_model(str(wrapped)).directory
    written = (first / "config.json").stat().st_mtime_ns
    assert resolve_model(str(wrapped)).directory == first
    assert (first / "config.json").stat().st_mtime_ns == written
    config = json.loads((wrapped / "config.json").read_text())
    config["text_config"]["routed_scaling_factor"] = 3.0
    (wrapped / "config.json").write_text(json.dumps(config))
    (wrapped / "generation_config.json").write_text("{}")
    again = resolve_model(str(wrapped))
    assert again.directory == first and again.config["routed_scaling_factor"] == 3.0
    assert (first / "generation_config.json").read_text() == "{}"
    assert check_checkpoint(first) == again.config


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"text_config": None}, "'text_config' is None; expected the language model's config"),
        ({"tie_word_embeddings": True}, "'tie_word_embeddings' is True, but in 'text_config' False"),
    ],
)
def test_a_wrapper_that_says_nothing_of_its_language_model_is_refused(
    tmp_path: Path, text: Path, changes: dict[str, Any], said: str
) -> None:
    wrapped = kimi.published(text, tmp_path / "wrapped")
    config = json.loads((wrapped / "config.json").read_text())
    (wrapped / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(CheckpointError, match=said):
        resolve_model(str(wrapped))


def test_a_tensor_that_the_language_model_lacks_is_named(tmp_path: Path, text: Path) -> None:
    wrapped = kimi.published(text, tmp_path / "wrapped")
    path = wrapped / "model.safetensors"
    tensors = load_file(path)
    del tensors["language_model.model.layers.1.mlp.experts.2.up_proj.weight"]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"the weights lack model.layers.1.mlp.experts.2.up_proj.weight"):
        resolve_model(str(wrapped))
