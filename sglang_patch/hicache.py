"""The prefix cache's host tier on a machine without a GPU.

Symbol: `sglang.srt.mem_cache.pool_host.common._cuda_host_register` (SGLang 0.5.23), which pins the host pool for copies
by the GPU. Reason: it needs the CUDA driver; without a GPU there is nothing to pin for.
"""

from __future__ import annotations

from typing import Any

from kt_runtime.sglang_patch.hooks import Hooks

SYMBOLS = ("sglang.srt.mem_cache.pool_host.common._cuda_host_register",)


def install(hooks: Hooks) -> None:
    if hooks.on_cpu:
        hooks.replace(SYMBOLS[0], _register_nothing)


def _register_nothing(*args: Any, **kwargs: Any) -> None:
    pass
