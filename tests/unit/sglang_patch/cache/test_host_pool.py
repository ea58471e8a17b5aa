"""The host tier's pool on a machine without a GPU, and what a GPU's keeps."""

from __future__ import annotations

from typing import Any

import psutil

from kt_runtime.sglang_patch import plugin
from kt_runtime.sglang_patch.cache import host_copies as cache_host_copies
from kt_runtime.sglang_patch.cache import host_pool as cache_host_pool


class Recorder:
    """Stands in for `Hooks`: applying hooks for a GPU would spoil this process."""

    def __init__(self, on_cpu: bool) -> None:
        self.on_cpu, self.has_cuda_kernels = on_cpu, not on_cpu
        self.touched: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return lambda target, *_: self.touched.add(target)


def test_its_memory_is_not_pinned(pools: Any) -> None:
    assert not pools.host.pin_memory
    assert pools.host.get_dummy_flat_data_page().numel() > 0  # asks torch for pinned memory where it is


def test_no_gigabytes_are_kept_back_from_it(patched_sglang: None) -> None:
    from sglang.srt.mem_cache.pool_host.base import host_memory_budget_bytes

    assert host_memory_budget_bytes() > 0.5 * psutil.virtual_memory().available


def test_on_a_gpu_only_the_reserve_is_changed() -> None:
    for module, expected in ((cache_host_pool, {cache_host_pool.RESERVE}), (cache_host_copies, set())):
        on_gpu, on_cpu = Recorder(False), Recorder(True)
        module.install(on_gpu)  # type: ignore[arg-type]
        module.install(on_cpu)  # type: ignore[arg-type]
        assert on_gpu.touched == expected
        assert on_cpu.touched == set(module.SYMBOLS)


def test_all_parts_of_the_cache_are_installed() -> None:
    assert {"cache.host_pool", "cache.host_copies", "cache.page_hash", "cache.events"} <= set(plugin.PATCHES)
