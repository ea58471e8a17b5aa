"""The adapter directories that are written, read by SGLang 0.5.23's own class: the same tensors as in our slots."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from reference import lora
from reference.families import PRESETS
from safetensors.torch import load_file

from kt_runtime.adapters import readers, write_peft_directory
from kt_runtime.families import family_for
from kt_runtime.sglang_patch.lora.adapter import POOL_NAMES, build_adapter

RANK = 4
FAMILIES = (
    *("qwen3_moe", "deepseek_v3", "mixtral", "olmoe", "glm4_moe", "glm4_moe_lite", "minimax_m2", "llama4_text"),
    *("deepseek_v32", "glm_moe_dsa", "gpt_oss", "qwen3_next"),
)
EXPERTS = {name: name.removesuffix("_moe") for name in POOL_NAMES.values()}


def read_by_sglang(path: Path, num_layers: int) -> list[dict[str, torch.Tensor]]:
    """Its tensors by name, of each layer, after it has stacked what its linears compute as one."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.lora.lora import LoRAAdapter
    from sglang.srt.lora.lora_config import LoRAConfig

    base: Any = SimpleNamespace(num_hidden_layers=num_layers)
    backend: Any = None
    adapter = LoRAAdapter("a", LoRAConfig(str(path)), base, LoadConfig(), backend)
    adapter.initialize_weights_from_tensors(load_file(path / "adapter_model.safetensors"))
    return [layer.weights for layer in adapter.layers]


def test_the_queries_of_v2_lite_are_said_to_be_refused_by_it(patched_sglang: None, tmp_path: Path) -> None:
    config = PRESETS["deepseek_v2"].config
    adapter = lora.random_adapter(config, rank=RANK, alpha=8.0, seed=3)
    write_peft_directory(tmp_path / "a", adapter, family_for(config), config, max_rank=RANK)
    assert "SGLang 0.5.23 alone expects k_proj" in readers(tmp_path / "a", config)[0].remark
    with pytest.raises(KeyError, match="v_proj"):
        read_by_sglang(tmp_path / "a", config["num_hidden_layers"])


def test_what_it_leaves_out_of_qwen3_5_is_said(patched_sglang: None, tmp_path: Path) -> None:
    config = PRESETS["qwen3_5_moe_text"].config
    adapter = lora.random_adapter(config, rank=RANK, alpha=8.0, seed=3)
    write_peft_directory(tmp_path / "a", adapter, family_for(config), config, max_rank=RANK, fuses_experts=False)
    names = {name for layer in read_by_sglang(tmp_path / "a", config["num_hidden_layers"]) for name in layer}
    assert any(".in_proj_qkv.lora_A" in name for name in names)  # under a name that its merged linear does not have
    assert not any(".in_proj_qkvz." in name for name in names)
    ours, theirs = readers(tmp_path / "a", config)[:2]
    left_out = sum(
        pair.a.numel() + pair.b.numel()
        for name, pair in adapter.modules.items()
        if name.endswith(("in_proj_qkv", "in_proj_z"))
    )
    assert ours.num_loaded == ours.num_parameters and theirs.program == "SGLang 0.5.23 alone"
    assert theirs.num_parameters - theirs.num_loaded == left_out > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_sglang_s_own_class_stacks_the_tensors_of_our_slots(patched_sglang: None, tmp_path: Path, family: str) -> None:
    config = PRESETS[family].config
    table = family_for(config)
    adapter = lora.random_adapter(config, rank=RANK, alpha=8.0, seed=3)
    write_peft_directory(tmp_path / "a", adapter, table, config, max_rank=RANK, fuses_experts=False)
    said = readers(tmp_path / "a", config)[0]
    assert "SGLang" in said.program and said.num_loaded == said.num_parameters
    theirs = read_by_sglang(tmp_path / "a", config["num_hidden_layers"])
    ours = build_adapter("a", adapter, table.lora_modules(config), torch.float32).weights
    seen = 0
    for (name, layer), parts in ours.items():
        for letter, stacked in zip("AB", lora.joined(parts), strict=True):
            end = f".{EXPERTS.get(name, name)}.lora_{letter}.weight"
            found = {key: value for key, value in theirs[layer].items() if key.endswith(end)}
            if name not in EXPERTS:
                (single,) = (value for key, value in found.items() if ".experts." not in key)
                # Of some merged linears SGLang keeps A for each of the matrices: the same one as often.
                assert torch.equal(single, stacked.repeat(len(single) // len(stacked), 1)), (name, layer, letter)
                seen += 1
                continue
            for expert, matrix in enumerate(stacked):
                (single,) = (value for key, value in found.items() if f".experts.{expert}." in key)
                assert torch.equal(single, matrix), (name, layer, letter, expert)
                seen += 1
    assert seen == sum(map(len, theirs))  # nothing else is in the directory
