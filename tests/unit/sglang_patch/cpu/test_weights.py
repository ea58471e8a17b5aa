"""SGLang gets every tensor but the routed experts."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from reference.checkpoints.quantized_checkpoint import quantize_checkpoint
from reference.checkpoints.transformers_checkpoint import save
from reference.families import PRESETS
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from kt_runtime.serve.models.make_model import make_model
from kt_runtime.sglang_patch.cpu.weights import dense_tensors


def config_of(directory: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return content


def test_routed_experts_are_left_out_and_nothing_else(tmp_path: Path) -> None:
    make_model("tiny-deepseek-v3", tmp_path / "model", seed=0)
    files = sorted(str(path) for path in (tmp_path / "model").glob("*.safetensors"))
    expected: dict[str, Any] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            expected |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    experts = {name for name in expected if ".mlp.experts." in name}
    found = dict(dense_tensors(files, torch.float32, config_of(tmp_path / "model")))
    assert experts
    assert any("shared_experts" in name for name in found)
    assert set(found) == set(expected) - experts
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("scheme", ["fp8", "int4_g32", "gptq_int4_g32", "awq_g32"])
def test_quantized_tensors_come_as_if_they_had_never_been_quantized(tmp_path: Path, scheme: str) -> None:
    make_model("tiny-deepseek-v3", tmp_path / "model", seed=0)
    quantized, plain = quantize_checkpoint(tmp_path / "model", tmp_path, scheme)
    with safe_open(plain / "model.safetensors", framework="pt") as opened:
        expected = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    files = sorted(str(path) for path in quantized.glob("*.safetensors"))
    found = dict(dense_tensors(files, torch.float32, config_of(quantized)))
    assert set(found) == {name for name in expected if ".mlp.experts." not in name}
    assert all(torch.equal(found[name].float(), expected[name]) for name in found)
    assert found["model.layers.0.self_attn.o_proj.weight"].dtype == torch.float32
    assert found["model.norm.weight"].dtype == torch.bfloat16


def test_the_layer_of_multi_token_prediction_is_read_past_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_model("tiny-glm4-moe", tmp_path / "model", seed=0)
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    behind = {f"model.layers.3.{name}.weight": torch.ones(2, 2).bfloat16() for name in ("eh_proj", "enorm", "mlp.gate")}
    save_file(tensors | behind, path, {"format": "pt"})
    with caplog.at_level(logging.INFO):
        found = dict(dense_tensors([str(path)], torch.float32, config_of(tmp_path / "model")))
    assert not behind.keys() & found.keys()
    assert found.keys() == {name for name in tensors if ".mlp.experts." not in name}
    assert "read past 3 tensors behind the last layer, such as model.layers.3.eh_proj.weight" in caplog.text


@pytest.mark.parametrize("fused", [True, False])
def test_tensors_come_by_the_names_that_sglang_expects(tmp_path: Path, fused: bool) -> None:
    model = save(PRESETS["mixtral"], tmp_path / "model", torch.float32, fused=fused)
    found = dict(dense_tensors([str(model / "model.safetensors")], torch.float32, config_of(model)))
    assert "model.layers.0.block_sparse_moe.gate.weight" in found
    assert not any(".experts." in name or ".mlp." in name for name in found)
