"""Pages of more than one token on a CPU.

Symbol: `sglang.srt.mem_cache.allocation.get_last_loc` (SGLang 0.5.23), which finds the cache slot of a sequence's last
token. Reason: for every attention backend but two that it knows by name, it starts a Triton kernel. Its own torch
version is right for `kt_cpu`.
"""

from __future__ import annotations

from typing import Any

from kt_runtime.sglang_patch.hooks import Hooks

SYMBOLS = ("sglang.srt.mem_cache.allocation.get_last_loc", "sglang.srt.mem_cache.allocation.get_last_loc_torch")


def install(hooks: Hooks) -> None:
    if hooks.on_cpu:
        hooks.replace(SYMBOLS[0], _get_last_loc)


def _get_last_loc(*args: Any, **kwargs: Any) -> Any:
    from sglang.srt.mem_cache.allocation import get_last_loc_torch

    return get_last_loc_torch(*args, **kwargs)
