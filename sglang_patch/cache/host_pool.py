"""The prefix cache's host tier: a pool of pages in CPU memory.

Symbols (SGLang 0.5.23) and reasons:

- `pool_host.common._cuda_host_register` pins the pool for copies by the GPU and needs the CUDA driver. Without CUDA,
  copies work from ordinary memory. The same holds for the argument `pin_memory` of `HostKVCache.__init__`, with which
  SGLang asks torch for pinned memory for a page.
- `pool_host.base.HICACHE_HOST_MEMORY_RESERVE_BYTES`: SGLang refuses a pool that leaves less than 10 GiB free, so a
  small machine could have no host pool. `kt-runtime serve` itself compares all required memory with the available.
"""

from __future__ import annotations

from typing import Any

from kt_runtime.sglang_patch.hooks import Hooks

REGISTER = "sglang.srt.mem_cache.pool_host.common._cuda_host_register"
MAKE_POOL = "sglang.srt.mem_cache.pool_host.base.HostKVCache.__init__"
RESERVE = "sglang.srt.mem_cache.pool_host.base.HICACHE_HOST_MEMORY_RESERVE_BYTES"
SYMBOLS = (REGISTER, MAKE_POOL, RESERVE)


def install(hooks: Hooks) -> None:
    hooks.set(RESERVE, 0)
    if not hooks.has_cuda_kernels:
        hooks.replace(REGISTER, _register_nothing)
        hooks.before(MAKE_POOL, _without_pinned_memory)


def _register_nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _without_pinned_memory(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Overrides a keyword: all parameters of the pool's `__init__` are keyword-only."""
    return args, {**kwargs, "pin_memory": False}
