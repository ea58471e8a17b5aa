"""The prefix cache's host tier: a pool of pages in memory beside the device's.

Symbols (SGLang 0.5.23) and reasons:

- `pool_host.common._cuda_host_register` pins the pool for copies by the GPU. It needs the CUDA driver; without a GPU
  there is nothing to pin for. The same for `HostKVCache.__init__`'s `pin_memory`, with which a page asks torch for
  pinned memory.
- `pool_host.base.HICACHE_HOST_MEMORY_RESERVE_BYTES`: SGLang refuses a pool that would not leave 10 GiB free, so that a
  small machine can have none at all. `kt-runtime serve` has compared everything that it needs with what there is.
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
    if hooks.on_cpu:
        hooks.replace(REGISTER, _register_nothing)
        hooks.before(MAKE_POOL, _without_pinned_memory)


def _register_nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _without_pinned_memory(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Every pool passes all by name (the parameters are keyword-only)."""
    return args, {**kwargs, "pin_memory": False}
