"""What is patched where: on a CPU, with CUDA, and on an accelerator that has PyTorch's operators only."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kt_runtime import device
from kt_runtime.device import DeviceMemory
from kt_runtime.sglang_patch import platform
from kt_runtime.sglang_patch.hooks import Hooks
from kt_runtime.sglang_patch.plugin import patch_module

CPU, CUDA, OTHER = (True, False), (False, True), (False, False)  # on_cpu, has_cuda_kernels
WITHOUT_CUDA_KERNELS = (
    *("cache.paging", "cache.host_pool", "cache.host_copies", "cpu.router", "cpu.norms", "cpu.logprobs"),
    *("lora.linear", "lora.kv_b"),
)
ON_A_CPU_ONLY = ("cpu.linear", "cpu.absorbed", "cpu.activation", "cpu.grouped_router", "cpu.step", "lora.pinned_memory")


class Recorder(Hooks):
    """Records what a patch touches, and applies nothing."""

    def __init__(self, on_cpu: bool, has_cuda_kernels: bool) -> None:
        super().__init__(on_cpu, has_cuda_kernels)
        self.touched: dict[str, Any] = {}

    def _register(self, target: str, hook: Callable[..., Any], kind: str) -> None:
        self.touched[target] = hook

    def add(self, target: str, value: Any) -> None:
        self.touched[target] = value

    set = add


def touched(name: str, kind: tuple[bool, bool]) -> dict[str, Any]:
    hooks = Recorder(*kind)
    patch_module(name).install(hooks)
    return hooks.touched


@pytest.mark.parametrize("name", WITHOUT_CUDA_KERNELS)
def test_what_replaces_a_cuda_kernel_is_patched_wherever_none_runs(name: str) -> None:
    assert touched(name, CPU).keys() == touched(name, OTHER).keys() > touched(name, CUDA).keys()


@pytest.mark.parametrize("name", ON_A_CPU_ONLY)
def test_what_computes_in_host_memory_is_patched_on_a_cpu_only(name: str) -> None:
    assert touched(name, CPU).keys() > touched(name, OTHER).keys() == touched(name, CUDA).keys()


def test_adapters_of_experts_are_in_host_memory_with_any_accelerator() -> None:
    load, init = patch_module("lora.pool").SYMBOLS
    for place in (CPU, CUDA, OTHER):
        assert touched("lora.pool", place).keys() == {load, init}
    assert touched("lora.pool", CPU)[load] == touched("lora.pool", OTHER)[load] != touched("lora.pool", CUDA)[load]


@pytest.mark.parametrize(
    ("kind", "name"), [(None, "CpuPlatform"), ("cuda", None), ("privateuseone", "AcceleratorPlatform")]
)
def test_sglangs_platform_is_kept_for_cuda_only(
    kind: str | None, name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "accelerator", lambda: None if kind is None else torch.device(kind))
    hooks = Hooks.for_this_process()
    assert (hooks.on_cpu, hooks.has_cuda_kernels) == (kind is None, kind == "cuda")
    assert platform.activate() == (None if name is None else f"kt_runtime.sglang_patch.platform:{name}")


@pytest.mark.parametrize("kind", [None, "cuda", "privateuseone"])
def test_packages_for_cuda_can_be_imported_where_there_is_cuda_only(
    kind: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *others = platform.ONLY_FOR_CUDA
    modules: dict[str, ModuleType | None] = {first: ModuleType(first)}  # imported before: it stays
    monkeypatch.setattr(device, "accelerator", lambda: None if kind is None else torch.device(kind))
    monkeypatch.setattr(platform, "sys", SimpleNamespace(modules=modules))
    platform.activate()
    assert isinstance(modules.pop(first), ModuleType)
    assert modules == ({} if kind == "cuda" else dict.fromkeys(others))


@pytest.mark.skipif(device.has_cuda(), reason="a machine with CUDA imports them")
def test_sglang_has_imported_no_package_for_cuda_and_says_so_itself(patched_sglang: None) -> None:
    from sglang.srt.layers.quantization import modelopt_quant
    from sglang.srt.models.registry import ModelRegistry

    assert ModelRegistry.get_supported_archs()  # by now all modules of models are imported
    assert [name for name in platform.ONLY_FOR_CUDA if sys.modules.get(name)] == []
    assert not modelopt_quant.enable_flashinfer_fp4_gemm


def test_the_platform_of_another_accelerator_answers_with_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = {0: DeviceMemory(3, 10), 1: DeviceMemory(6, 20)}
    monkeypatch.setattr(device, "accelerator", lambda: torch.device("privateuseone"))
    monkeypatch.setattr(device, "memory", lambda where: memory[where.index])
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    found: Any = platform.AcceleratorPlatform()
    assert found.is_out_of_tree() and found.device_type == "privateuseone"
    assert found.get_device(1) == torch.device("privateuseone", 1)
    assert (found.get_device_total_memory(0), found.get_available_memory(1)) == (10, (6, 20))
    assert found.get_current_memory_usage() == 14
    assert found.is_pin_memory_available() and found.get_dispatch_key_name() == "native"
    assert not found.capabilities.supports_triton and not found.capabilities.graph_capture
