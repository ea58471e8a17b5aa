"""Adapters that PEFT made on Qwen3.5 with its vision tower: `language_model.` in their names, experts fused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from reference import lora
from reference.checkpoints import qwen3_5
from reference.delta_net import hugging_face_in_float64
from transformers import AutoModelForCausalLM

from kt_runtime.adapters import read_peft_directory, readers, write_peft_directory
from kt_runtime.cli.adapter.merged_checkpoint import write_merged
from kt_runtime.families import family_for, naming
from kt_runtime.families.stack import ExpertMlp
from kt_runtime.serve.models.report import resolve_model

PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.mark.parametrize("targets", [["q_proj", "in_proj_qkv", "in_proj_a"], ["shared_expert.gate_proj"]])
def test_what_peft_trained_on_the_whole_model_is_read_and_computes_the_same(tmp_path: Path, targets: list[str]) -> None:
    settings = peft.LoraConfig(r=4, lora_alpha=6, target_modules=targets, target_parameters=PARAMETERS)
    wrapped: Any = peft.get_peft_model(qwen3_5.build(), settings)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    wrapped.save_pretrained(tmp_path / "a")
    adapter = read_peft_directory(tmp_path / "a", family_for(qwen3_5.TEXT), qwen3_5.TEXT, max_rank=8)
    assert any(".experts." in name for name in adapter.modules)
    merged = qwen3_5.build()
    parameters = {naming.without_wrapper(name): tensor.data for name, tensor in merged.named_parameters()}
    for name, pair in adapter.modules.items():
        lora.rows(parameters, name, ExpertMlp()).add_(lora.delta(pair, adapter.scaling))
    tokens = torch.arange(24).reshape(2, 12)
    with torch.no_grad(), hugging_face_in_float64():
        plain, expected, found = (model(tokens).logits for model in (qwen3_5.build(), wrapped, merged))
    assert (expected - plain).abs().max() > 0.1
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def test_it_is_said_who_reads_what_is_written(tmp_path: Path) -> None:
    adapter = lora.random_adapter(qwen3_5.TEXT, rank=4, alpha=6.0, seed=1)
    family = family_for(qwen3_5.TEXT)
    for name, fuses in (("peft", True), ("sglang", False)):
        write_peft_directory(tmp_path / name, adapter, family, qwen3_5.TEXT, max_rank=8, fuses_experts=fuses)
        ours, *_, by_peft, _ = readers(tmp_path / name, qwen3_5.TEXT)
        assert ours.num_loaded == ours.num_parameters
        assert (by_peft.num_loaded == by_peft.num_parameters) == fuses
        assert ("drops a pair for each" in by_peft.remark) != fuses


@pytest.mark.slow
def test_a_merged_checkpoint_of_the_whole_model_is_the_language_model_with_the_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    base = resolve_model(str(qwen3_5.save(tmp_path / "whole")))
    adapter = lora.random_adapter(base.config, rank=4, alpha=6.0, seed=1)
    write_merged(base.directory, adapter, tmp_path / "merged", dtype=torch.float32)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert type(found).__name__ == "Qwen3_5MoeForCausalLM"
    plain = AutoModelForCausalLM.from_pretrained(base.directory, dtype=torch.float32)
    tokens = torch.arange(24).reshape(2, 12)
    with torch.no_grad(), hugging_face_in_float64():
        before, expected, merged = (
            model(tokens).logits for model in (plain, lora.merge(copy.deepcopy(plain), adapter), found)
        )
    assert (expected - before).abs().max() > 0.1
    assert (merged - expected).abs().max() <= 1e-5 * expected.abs().max()
