"""Replaces pinned memory by ordinary memory in SGLang's LoRA code, in a process without an accelerator only.

Symbols (SGLang 0.5.23): `LoRAManager.__init__`, `.load_lora_adapter`, `.load_lora_adapter_from_tensors`,
`.fetch_new_loras`, `.prepare_lora_batch`, `.unload_lora_adapter`. Reason: SGLang's LoRA code requests pinned memory
without checking for a device when it wraps layers, loads weights and prepares batches. torch raises an error for such a
request without an accelerator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kt_runtime.sglang_patch.hooks import Hooks

MANAGER = "sglang.srt.lora.lora_manager.LoRAManager"
SYMBOLS = tuple(
    f"{MANAGER}.{method}"
    for method in (
        "__init__",
        "load_lora_adapter",
        "load_lora_adapter_from_tensors",
        "fetch_new_loras",
        "prepare_lora_batch",
        "unload_lora_adapter",
    )
)


def install(hooks: Hooks) -> None:
    if not hooks.on_cpu:
        return
    for symbol in SYMBOLS:
        hooks.around(symbol, without_pinned_memory)


def without_pinned_memory(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs `original(*args, **kwargs)` with requests for pinned memory answered by ordinary memory."""
    with UnpinnedMemory():
        return original(*args, **kwargs)


class UnpinnedMemory(TorchFunctionMode):
    """In this context `tensor.pin_memory()` returns `tensor`, and tensor factories ignore the argument `pin_memory`.

    Affects only the thread that entered the context.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.pin_memory:
            return args[0]
        kept = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        return func(*args, **kept)
