"""What is said of each program that loads an adapter; what PEFT really loads is in test_peft_round_trip.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kt_runtime.adapters import AdapterTensors, readers, write_peft_directory
from kt_runtime.adapters.programs import Reader


def written(model: Any, path: Path, *targets: str) -> tuple[AdapterTensors, list[Reader]]:
    adapter = model.adapter(*targets)
    write_peft_directory(path, adapter, model.family, model.config, max_rank=8)
    return adapter, readers(path, model.config)


def size(adapter: AdapterTensors, *parts: str) -> int:
    return sum(tensor.numel() for name, tensor in adapter.tensors.items() if any(part in name for part in parts))


def test_everybody_loads_all_of_a_qwen_adapter(tmp_path: Path, qwen: Any) -> None:
    adapter, found = written(qwen, tmp_path / "a", "all")
    total = size(adapter, "")
    assert [(reader.num_loaded, reader.num_parameters) for reader in found] == [(total, total)] * 3
    assert str(found[0]) == f"kt-runtime and SGLang 0.5.23: all {total:,} parameters"


def test_sglang_alone_refuses_the_queries_of_v2_lite(tmp_path: Path, deepseek_v2_lite: Any) -> None:
    """What its class does then is in tests/unit/sglang_patch/lora/test_stock_sglang.py."""
    _, (server, _, _) = written(deepseek_v2_lite, tmp_path / "a", "all")
    assert (server.program, server.num_loaded) == ("kt-runtime", server.num_parameters)
    assert "SGLang 0.5.23 alone expects k_proj and v_proj beside q_proj" in server.remark
    _, (server, _, _) = written(deepseek_v2_lite, tmp_path / "b", "o_proj", "kv_b_proj", "experts")
    assert server.program == "kt-runtime and SGLang 0.5.23" and not server.remark


def test_llama_cpp_gets_no_file_with_kv_b_proj_and_uses_none_of_q_a_proj(tmp_path: Path, deepseek: Any) -> None:
    _, (_, peft, llama) = written(deepseek, tmp_path / "a", "all")
    assert peft.num_loaded == peft.num_parameters
    assert llama.num_loaded == 0 and "the export refuses kv_b_proj" in str(llama)
    adapter, (_, _, llama) = written(deepseek, tmp_path / "b", "q_a_proj", "kv_a_proj_with_mqa", "o_proj")
    assert llama.num_loaded == size(adapter, "o_proj")
    assert "it loads kv_a_proj_with_mqa, q_a_proj and does not use them" in str(llama)


def test_a_directory_from_before_target_parameters_is_told_to_be_exported_again(tmp_path: Path, deepseek: Any) -> None:
    adapter, _ = written(deepseek, tmp_path / "a", "all")
    path = tmp_path / "a" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"target_parameters": None}))
    peft = readers(tmp_path / "a", deepseek.config)[1]
    dense = size(adapter, "shared_experts", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    assert peft.num_parameters - peft.num_loaded == dense > 0
    assert "drops dense MLPs and shared experts; `kt-runtime adapter export`" in str(peft)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "kimi_k2"])
def test_modules_that_a_checkpoint_brings_are_all_found(tmp_path: Path, deepseek: Any, model_type: str) -> None:
    deepseek.config["model_type"] = model_type
    _, (_, peft, _) = written(deepseek, tmp_path / "a", "all")
    assert peft.num_loaded == peft.num_parameters
    assert ("trust_remote_code" in peft.program) == (model_type == "kimi_k2")
