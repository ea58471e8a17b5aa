"""LoRA without a CUDA driver: pinned memory becomes ordinary memory.

Symbols (SGLang 0.5.23): `LoRAManager.__init__`, `.load_lora_adapter`, `.load_lora_adapter_from_tensors`,
`.fetch_new_loras`, `.prepare_lora_batch`, `.unload_lora_adapter`. Reason: SGLang's LoRA code asks for pinned memory
without looking whether there is a device, when it wraps layers, loads weights and prepares every batch; without a CUDA
driver torch refuses. Only on a machine without CUDA.
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
    """`original(*args, **kwargs)`, in which asking torch for pinned memory gives ordinary memory."""
    with UnpinnedMemory():
        return original(*args, **kwargs)


class UnpinnedMemory(TorchFunctionMode):
    """Within this context `tensor.pin_memory()` is `tensor`, and the argument `pin_memory` of factories is dropped.

    Holds for the thread that entered it.
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
