"""gpt-oss's experts as PEFT adapts them: what PEFT writes is read, what doesn't fit is refused, and the other form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from reference import lora
from safetensors.torch import load_file, save_file

from kt_runtime.adapters import content_hash, read_peft_directory, readers, write_peft_directory
from kt_runtime.errors import AdapterError

PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def read(model: Any, path: Path, max_rank: int = 8) -> Any:
    return read_peft_directory(path, model.family, model.config, max_rank=max_rank)


@pytest.mark.parametrize("parameters", [PARAMETERS, PARAMETERS[:1], PARAMETERS[1:]])
def test_what_peft_trained_is_read_and_computes_the_same(tmp_path: Path, gpt_oss: Any, parameters: list[str]) -> None:
    """Gate and up share A there."""
    settings = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj"], target_parameters=parameters)
    wrapped: Any = peft.get_peft_model(gpt_oss.build(), settings)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    wrapped.save_pretrained(tmp_path / "a")
    adapter = read(gpt_oss, tmp_path / "a")
    assert (adapter.rank, adapter.alpha) == (4, 6.0)
    tokens = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        expected = wrapped(tokens).logits
        found = lora.merge(gpt_oss.build(), adapter)(tokens).logits
        assert (expected - gpt_oss.build()(tokens).logits).abs().max() > 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_a_pair_for_each_expert_is_written_where_it_is_asked_for(tmp_path: Path, gpt_oss: Any) -> None:
    adapter = gpt_oss.adapter("all")
    write_peft_directory(tmp_path / "a", adapter, gpt_oss.family, gpt_oss.config, max_rank=8, fuses_experts=False)
    names = load_file(tmp_path / "a" / "adapter_model.safetensors")
    assert "base_model.model.model.layers.1.mlp.experts.3.up_proj.lora_B.weight" in names
    assert content_hash(read(gpt_oss, tmp_path / "a")) == content_hash(adapter)
    write_peft_directory(tmp_path / "b", adapter, gpt_oss.family, gpt_oss.config, max_rank=8)
    settings = json.loads((tmp_path / "b" / "adapter_config.json").read_text())
    assert settings["target_parameters"] == PARAMETERS and settings["rank_pattern"] == {PARAMETERS[0]: 8}
    for name, loads in (("a", False), ("b", True)):
        peft_s = readers(tmp_path / name, gpt_oss.config)[1]
        assert (peft_s.num_loaded == peft_s.num_parameters) == loads


def test_the_highest_rank_comes_back(tmp_path: Path, gpt_oss: Any) -> None:
    """gate_up_proj has twice the rank in the file."""
    adapter = gpt_oss.adapter("experts", rank=8, alpha=10 / 3)
    write_peft_directory(tmp_path / "a", adapter, gpt_oss.family, gpt_oss.config, max_rank=8)
    again = read(gpt_oss, tmp_path / "a")
    assert (again.rank, again.alpha) == (8, 10 / 3) and content_hash(again) == content_hash(adapter)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("half", r"experts.lora_B.weight' is missing; its other half is there"),
        ("shape", r"A has shape \[15, 16\] and B \[32, 16\]; expected \[4 R, 32\] and \[32, 4 R\] \(gate_up_proj\)"),
        ("layer", r"layers.7.mlp.experts' is adapted; this model has no routed experts there"),
        ("rank", r"has rank 16|rank.* 16"),
    ],
)
def test_fused_tensors_that_do_not_fit_are_refused(tmp_path: Path, gpt_oss: Any, change: str, message: str) -> None:
    rank = 8 if change == "rank" else 4
    write_peft_directory(
        tmp_path / "a", gpt_oss.adapter("experts", rank=rank), gpt_oss.family, gpt_oss.config, max_rank=8
    )
    path = tmp_path / "a" / "adapter_model.safetensors"
    tensors = load_file(path)
    down = "base_model.model.model.layers.0.mlp.experts.lora_"
    if change == "half":
        del tensors[f"{down}B.weight"]
    elif change == "shape":
        tensors[f"{down}A.weight"] = tensors[f"{down}A.weight"][:15].contiguous()
    elif change == "layer":
        tensors = {name.replace("layers.0", "layers.7"): tensor for name, tensor in tensors.items()}
    else:  # gate and up that share A, of twice the highest rank
        both = "base_model.model.model.layers.0.mlp.experts.base_layer.lora_B.weight"
        tensors[both] = torch.ones_like(tensors[both])
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(AdapterError, match=message):
        read(gpt_oss, tmp_path / "a")
