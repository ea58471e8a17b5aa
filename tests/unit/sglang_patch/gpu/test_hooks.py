"""Which hooks an accelerator's process gets, and a process on a CPU does not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kt_runtime.sglang_patch import plugin
from kt_runtime.sglang_patch.gpu import lora_buffers, replays, shared_experts

MODULES = (lora_buffers, replays, shared_experts)


class Registered:
    def __init__(self, on_cpu: bool) -> None:
        self.on_cpu = on_cpu
        self.targets: list[str] = []

    def around(self, target: str, hook: Any) -> None:
        self.targets.append(target)

    after = around


@pytest.mark.parametrize("module", MODULES)
def test_a_cpu_keeps_sglangs_own_code(module: Any) -> None:
    hooks = Registered(on_cpu=True)
    module.install(hooks)
    assert hooks.targets == []
    assert module.__name__.removeprefix("kt_runtime.sglang_patch.") in plugin.PATCHES


@pytest.mark.parametrize(
    ("module", "hooked"),
    [
        (lora_buffers, lora_buffers.SYMBOLS),
        (replays, replays.SYMBOLS[:1]),  # the others are called
        (shared_experts, shared_experts.SYMBOLS),
    ],
)
def test_an_accelerator_gets_each_hook(module: Any, hooked: tuple[str, ...]) -> None:
    hooks = Registered(on_cpu=False)
    module.install(hooks)
    assert tuple(hooks.targets) == hooked


def test_sglang_allocates_lora_buffers_for_its_own_experts_only() -> None:
    calls: list[Any] = []

    def original(backend: Any, max_bs: int, max_loras: int, dtype: Any, moe_layer: Any, **kwargs: Any) -> None:
        calls.append((moe_layer, kwargs))

    stored, own = SimpleNamespace(experts_forward=None), SimpleNamespace()
    for layer in (stored, own):
        lora_buffers.allocate_buffers(
            original, None, max_bs=8, max_loras=2, compute_dtype=None, moe_layer=layer, prefill=True
        )
    assert calls == [(own, {"prefill": True})]


def test_sglang_can_prepare_graphs_for_a_model_with_lora_on_stored_experts(
    served: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the hook, SGLang's own function fails on kt-runtime's layer: it has no weights."""
    from sglang.srt.lora.backend.base_backend import BaseLoRABackend

    from kt_runtime.families import family_for

    layer_id = family_for(served.config).moe_layers(served.config)[0]
    layer = served.model.get_submodule(f"model.layers.{layer_id}.mlp.experts")
    arguments = {"max_bs": 8, "max_loras": 4, "compute_dtype": None, "moe_layer": layer}
    original = BaseLoRABackend.init_cuda_graph_moe_buffers
    backend = served.manager.lora_backend
    with pytest.raises(AttributeError, match="_quant_info"):
        original(backend, **arguments)
    backend._moe_cg_buffer_max_bs = None
    lora_buffers.allocate_buffers(original, backend, **arguments)
    assert backend._moe_cg_buffer_max_bs is None
