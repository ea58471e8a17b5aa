"""SGLang's own DeepSeek layer with the hooks of an accelerator gives the bits that it gives without them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kt_runtime.errors import ConflictError
from kt_runtime.families import family_for
from kt_runtime.sglang_patch.cpu import moe
from kt_runtime.sglang_patch.gpu import experts, shared_experts


@pytest.fixture
def block(served: SimpleNamespace, manager: Any, log: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The MLP of a DeepSeek layer with shared experts, hooked as on an accelerator. Qwen3-MoE has none: None."""
    layer_id = family_for(served.config).moe_layers(served.config)[0]
    found = served.model.get_submodule(f"model.layers.{layer_id}.mlp")
    if not hasattr(found, "_forward_shared_experts"):
        yield None
        return
    kept, scaling = found.experts.moe_runner_config.inplace, found.routed_scaling_factor
    original = type(found)._forward_shared_experts

    def hooked(block: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(block, *args, **kwargs)
        log.append("shared experts queued")
        shared_experts.after_shared_experts(result, block, *args, **kwargs)
        return result

    def on_device(layer: Any, x: torch.Tensor, topk: Any, adapters: Any = experts.no_adapters) -> torch.Tensor:
        log.append("routed experts called")

        def compute(*args: Any) -> torch.Tensor:
            log.append("host computes")
            return moe._compute(layer_id, *args)

        return experts.forward(compute, x, topk.topk_ids, topk.topk_weights, adapters)

    monkeypatch.setattr(type(found), "_forward_shared_experts", hooked)
    monkeypatch.setattr(found.experts.base_layer, "experts_forward", on_device.__get__(found.experts.base_layer))
    monkeypatch.setattr(shared_experts, "device", SimpleNamespace(is_host=lambda _: False))
    yield found
    found.experts.moe_runner_config.inplace, found.routed_scaling_factor = kept, scaling


def forward(block: Any, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = shared_experts.forward(type(block).forward_normal, block, x, **kwargs)
        return result


def test_routed_experts_are_computed_while_the_shared_ones_are_queued(
    served: SimpleNamespace, block: Any, log: list[str]
) -> None:
    if block is None:
        assert "n_shared_experts" not in served.config
        return
    x = torch.randn(5, served.config["hidden_size"], generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = type(block).forward_normal(block, x)
    del log[:]
    shared_experts.routed_experts_first(None, block)
    assert block.routed_scaling_factor == 1.0, "the routing weights have the factor already"
    found = forward(block, x)
    assert torch.equal(found, wanted)
    assert log == [
        "routed experts called",
        "model records",
        "shared experts queued",
        "experts waits for model's event",
        "host computes",
        "experts records",
        "model waits for experts's event",
    ]


def test_without_the_order_that_the_hook_sets_the_layer_is_refused(
    served: SimpleNamespace, block: Any, log: list[str]
) -> None:
    """SGLang would add the shared experts to a result that is not there yet."""
    if block is None:
        return
    block.experts.moe_runner_config.inplace = True
    with pytest.raises(ConflictError, match="were not finished"):
        forward(block, torch.randn(2, served.config["hidden_size"]))


def test_a_call_without_shared_experts_is_not_split(served: SimpleNamespace, block: Any, log: list[str]) -> None:
    if block is None:
        return
    shared_experts.routed_experts_first(None, block)
    forward(block, torch.randn(2, served.config["hidden_size"]), skip_shared_experts=True)
    assert log == ["routed experts called", "host computes"]
