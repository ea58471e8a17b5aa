from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kt_runtime.adapters import AdapterTensors, LoraPair, check_adapter, complete_groups, without_fillers
from kt_runtime.errors import AdapterError

Change = Callable[[AdapterTensors], AdapterTensors]
ATTENTION = "model.layers.0.self_attn"
O_PROJ = f"{ATTENTION}.o_proj"
DOWN = "model.layers.0.mlp.experts.down_proj"


def check(model: Any, adapter: AdapterTensors, max_rank: int = 8) -> None:
    check_adapter(adapter, model.family, model.config, max_rank)


def put(name: str, a: torch.Tensor, b: torch.Tensor) -> Change:
    return lambda adapter: replace(adapter, modules={**adapter.modules, name: LoraPair(a, b)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_complete_adapters_pass_in_every_dtype(model: Any, dtype: torch.dtype) -> None:
    adapter = model.adapter("all")
    pairs = {name: (pair.a.to(dtype), pair.b.to(dtype)) for name, pair in adapter.modules.items()}
    check(model, AdapterTensors.from_modules(4, 8.0, pairs))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda adapter: replace(adapter, rank=0), r"the rank\) is 0"),
        (lambda adapter: replace(adapter, rank=9), "above this server's largest, 8"),
        (lambda adapter: replace(adapter, rank=3), r"o_proj.lora_A.weight' has shape \[4, 48\]; expected \[3, 48\]"),
        (lambda adapter: replace(adapter, alpha=float("nan")), "lora_alpha is nan"),
        (lambda adapter: replace(adapter, alpha=-1.0), "lora_alpha is -1.0"),
        (lambda adapter: replace(adapter, modules={}), "has no LoRA tensors"),
        (put(f"{ATTENTION}.x_proj", torch.zeros(4, 32), torch.zeros(32, 4)), "x_proj' is no module .*did you mean"),
        (put("lm_head", torch.zeros(4, 32), torch.zeros(96, 4)), "'lm_head': router, embeddings and lm_head"),
        (put(f"{ATTENTION}.q_proj", torch.zeros(4, 32), torch.zeros(48, 4)), f"'{ATTENTION}.k_proj' is missing"),
        (put(O_PROJ, torch.zeros(4, 48), torch.zeros(32, 3)), rf"'{O_PROJ}.lora_B.weight' has shape"),
        (put(O_PROJ, torch.zeros(4, 48).double(), torch.zeros(32, 4)), f"'{O_PROJ}.lora_A.weight' is torch.float64"),
        (put(O_PROJ, torch.zeros(4, 48), torch.full((32, 4), -torch.inf)), "o_proj.lora_B.weight' contains NaN or Inf"),
        (put(DOWN, torch.zeros(4, 4, 16), torch.zeros(3, 32, 4)), rf"'{DOWN}.lora_B.weight' has shape \[3, 32, 4\]"),
    ],
)  # fmt: skip
def test_what_can_not_be_served_is_refused_by_name(qwen: Any, change: Change, message: str) -> None:
    with pytest.raises(AdapterError, match=rf"adapter: .*{message}"):
        check(qwen, change(qwen.adapter("o_proj")))


def test_nan_is_found_in_bfloat16_too(qwen: Any) -> None:
    bad = torch.zeros(32, 4, dtype=torch.bfloat16)
    bad[31, 3] = torch.nan
    with pytest.raises(AdapterError, match="NaN"):
        check(qwen, put(O_PROJ, torch.zeros(4, 48), bad)(qwen.adapter("o_proj")))


def test_completing_groups_makes_any_selection_valid_and_changes_no_other_tensor(model: Any) -> None:
    whole = model.adapter("all")
    for name, pair in whole.modules.items():
        alone = AdapterTensors.from_modules(4, 8.0, {name: pair})
        completed = complete_groups(alone, model.family, model.config)
        check(model, completed)
        assert completed.modules[name].a is pair.a
        assert all(not other.b.any() for key, other in completed.modules.items() if key != name)
        assert list(without_fillers(completed).modules) == [name]


def test_a_complete_adapter_is_returned_itself(model: Any) -> None:
    adapter = model.adapter("all")
    assert complete_groups(adapter, model.family, model.config) is adapter


def test_fresh_lora_is_not_taken_for_a_filler(qwen: Any) -> None:
    fresh = AdapterTensors.from_modules(4, 8.0, {O_PROJ: (torch.randn(4, 48), torch.zeros(32, 4))})
    assert list(without_fillers(fresh).modules) == [O_PROJ]


def test_stacked_experts_and_flat_tensors_are_views_of_the_same_numbers(qwen: Any) -> None:
    adapter = qwen.adapter("experts")
    prefix = "model.layers.1.mlp.experts."
    stacked = {name.removeprefix(prefix): pair for name, pair in adapter.modules.items() if name.startswith(prefix)}
    assert list(stacked) == ["gate_proj", "up_proj", "down_proj"]
    flat = adapter.tensors["model.layers.1.mlp.experts.3.up_proj.lora_B.weight"]
    assert flat.data_ptr() == stacked["up_proj"].b[3].data_ptr()
    assert len(adapter.tensors) == 2 * 2 * 3 * 4
    assert adapter.num_bytes == 4 * sum(tensor.numel() for tensor in adapter.tensors.values())
