from __future__ import annotations

from typing import Any

import pytest
import torch
from reference import lora

from kt_runtime.adapters.merge import Merger, add_pair
from kt_runtime.adapters.tensors import LoraPair
from kt_runtime.errors import NumericsError


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_sum_is_the_exact_one_rounded_once(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(1300, 33, generator=generator).to(dtype)  # more rows than are added at once
    pair = LoraPair(torch.randn(5, 33, generator=generator), torch.randn(1300, 5, generator=generator))
    before = weight.clone()
    found = add_pair(weight, pair, 0.75, dtype)
    exact = weight.double() + 0.75 * pair.b.double() @ pair.a.double()
    assert found.dtype == dtype and torch.equal(weight, before)
    # The largest error of a sum before it is rounded: in float32 9.5e-7 measured, 1.2e-6 with other seeds; in float64
    # 1.8e-15. Such a sum may fall on the other side of the middle between two numbers.
    error = 5e-6 if dtype == torch.bfloat16 else 1e-14
    assert bool((((exact - error).to(dtype) <= found) & (found <= (exact + error).to(dtype))).all())


def test_dense_modules_and_single_experts_are_found_by_their_checkpoint_names(model: Any) -> None:
    adapter = model.adapter("o_proj", "down_proj")
    merger = Merger(adapter)
    o_proj, expert = "model.layers.0.self_attn.o_proj", "model.layers.1.mlp.experts.3.down_proj"
    assert {f"{o_proj}.weight", f"{expert}.weight"} <= merger.left
    weight = torch.randn(32, 16)
    pair = adapter.modules["model.layers.1.mlp.experts.down_proj"]
    found = merger.merged(f"{expert}.weight", weight, torch.float32)
    torch.testing.assert_close(found, weight + adapter.scaling * pair.b[3] @ pair.a[3], rtol=5e-7, atol=5e-7)
    assert f"{expert}.weight" not in merger.left and f"{o_proj}.weight" in merger.left
    other = torch.randn(4, 4)
    assert torch.equal(merger.merged("model.layers.0.mlp.gate.weight", other, torch.float32), other)


def test_a_sum_beyond_the_types_largest_value_is_an_error_that_names_the_tensor(qwen: Any) -> None:
    name = "model.layers.0.self_attn.o_proj.weight"
    adapter = qwen.adapter("o_proj")
    pair = adapter.modules[name.removesuffix(".weight")]
    weight = torch.zeros(len(pair.b), pair.a.shape[1], dtype=torch.float16)
    weight[1, 2] = 65504.0
    pair.a.zero_()
    pair.b.zero_()
    pair.a[0, 2] = 1.0
    pair.b[1, 0] = 64.0 / adapter.scaling
    with pytest.raises(NumericsError, match=rf"{name}\[1, 2\]: with the adapter added it is inf in float16.*65504"):
        Merger(adapter).merged(name, weight, torch.float16)
    assert Merger(adapter).merged(name, weight, torch.float32)[1, 2] == 65568.0


def test_pairs_that_change_nothing_are_not_waited_for(qwen: Any) -> None:
    adapter = qwen.adapter("o_proj")
    adapter.modules["model.layers.1.self_attn.o_proj"].b.zero_()
    assert Merger(adapter).left == {"model.layers.0.self_attn.o_proj.weight"}


def test_interleaved_and_transposed_experts_are_merged_as_by_hand(gpt_oss: Any) -> None:
    adapter = gpt_oss.adapter("experts")
    model = gpt_oss.build()
    merger = Merger(adapter, gpt_oss.family.expert_mlp(gpt_oss.config))
    parameters = dict(model.named_parameters())
    found = {name: merger.merged(name, tensor.detach(), torch.float32) for name, tensor in parameters.items()}
    assert not merger.left
    expected = dict(lora.merge(model, adapter).named_parameters())
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name].detach(), rtol=5e-7, atol=5e-7)  # 2.4e-7 of 2 measured
