"""Adapters as KTransformers saves them: dense parts as PEFT has them, routed experts in a file of their own."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kt_runtime.adapters import AdapterTensors, content_hash, read_peft_directory
from kt_runtime.errors import AdapterError

FUSED, TENSORS = "fused_expert_lora.safetensors", "adapter_model.safetensors"
GATE_A = "layers.1.experts.gate_lora_a"


def read(model: Any, path: Path) -> AdapterTensors:
    return read_peft_directory(path, model.family, model.config, max_rank=8)


@pytest.fixture
def kt(tmp_path: Path, model: Any, write_raw: Callable[..., Path]) -> tuple[Path, AdapterTensors]:
    """(directory, what it means): attention as PEFT names it, experts as kt-kernel does."""
    adapter = model.adapter("attention", "experts")
    dense = {name: tensor for name, tensor in adapter.tensors.items() if ".experts." not in name}
    fused = {}
    for name, pair in adapter.modules.items():
        if pair.is_stacked:
            _, _, layer, _, _, projection = name.split(".")
            for letter, tensor in zip("ab", pair, strict=True):
                key = f"layers.{layer}.experts.{projection.removesuffix('_proj')}_lora_{letter}"
                fused[key] = tensor.contiguous()
    path = write_raw(tmp_path / "kt", dense)
    save_file(fused, path / FUSED)
    (path / "kt_adapter_manifest.json").write_text("{}")
    return path, adapter


def test_both_files_are_one_adapter(kt: tuple[Path, AdapterTensors], model: Any) -> None:
    path, adapter = kt
    assert content_hash(read(model, path)) == content_hash(adapter)


def test_names_that_ktransformers_has_wrapped_are_understood(kt: tuple[Path, AdapterTensors], model: Any) -> None:
    path, adapter = kt
    wrapped = {name.replace("self_attn.", "self_attn.orig_module."): t for name, t in load_file(path / TENSORS).items()}
    save_file(wrapped, path / TENSORS)
    assert content_hash(read(model, path)) == content_hash(adapter)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers.1.experts.gate_lora_c": torch.zeros(4, 4, 32)}, f"{FUSED}: unknown key 'layers.1.experts.gate_lora"),
        ({"layers.7.experts.gate_lora_a": torch.zeros(4, 4, 32)}, "layer 7 of this model has no routed experts"),
        ({GATE_A: torch.zeros(3, 4, 32)}, r"shape \[3, 4, 32\]; expected three dimensions, the first of 4 experts"),
        ({GATE_A: torch.zeros(4, 32)}, r"shape \[4, 32\]; expected three dimensions"),
        ({GATE_A: torch.zeros(4, 5, 32)}, r"experts.0.gate_proj.lora_A.weight' has shape \[5, 32\]; expected \[4, 32"),
        ({GATE_A: None}, "experts.0.gate_proj.lora_A.weight' is missing"),
        ({GATE_A: torch.full((4, 4, 32), torch.inf)}, "experts.0.gate_proj.lora_A.weight' contains NaN or Inf"),
    ],
)
def test_a_broken_expert_file_is_refused_by_name(
    kt: tuple[Path, AdapterTensors], model: Any, change: dict[str, torch.Tensor | None], message: str
) -> None:
    path, _ = kt
    tensors: dict[str, Any] = {**load_file(path / FUSED), **change}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path / FUSED)
    with pytest.raises(AdapterError, match=message):
        read(model, path)


def test_the_same_expert_in_both_files_is_refused(kt: tuple[Path, AdapterTensors], model: Any) -> None:
    path, adapter = kt
    name = "model.layers.1.mlp.experts.2.up_proj.lora_A.weight"
    save_file({**load_file(path / TENSORS), f"base_model.model.{name}": adapter.tensors[name].clone()}, path / TENSORS)
    with pytest.raises(AdapterError, match=f"{re.escape(name)}' is in {TENSORS} too"):
        read(model, path)


def test_a_scaling_that_may_not_hold_for_the_experts_is_refused(
    tmp_path: Path, kt: tuple[Path, AdapterTensors], model: Any, write_raw: Callable[..., Path]
) -> None:
    path, _ = kt
    other = write_raw(tmp_path / "rs", load_file(path / TENSORS), use_rslora=True)
    (path / FUSED).rename(other / FUSED)
    with pytest.raises(AdapterError, match="use_rslora, rank_pattern or alpha_pattern"):
        read(model, other)
