"""Copies an `InstalledAdapter` into a slot of SGLang's LoRA memory pool, and places the pool's expert buffers.

Symbols (SGLang 0.5.23): `LoRAMemoryPool.load_lora_weight_to_buffer` and `.init_buffers`. Reasons: SGLang copies routed
experts one by one, which takes seconds for a large model and blocks every stream. An `InstalledAdapter` needs two
copies per fused linear. Without CUDA kernels, the base model's slot is not cleared either, because nothing reads a slot
of rank 0. With an accelerator, the buffers of routed experts are allocated in host memory, where the expert store reads
them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kt_runtime.sglang_patch.hooks import Hooks
from kt_runtime.sglang_patch.lora.adapter import FusedLora, InstalledAdapter

POOL = "sglang.srt.lora.mem_pool.LoRAMemoryPool"
SYMBOLS = (f"{POOL}.load_lora_weight_to_buffer", f"{POOL}.init_buffers")


def install(hooks: Hooks) -> None:
    hooks.around(SYMBOLS[0], load_clearing_base if hooks.has_cuda_kernels else load_adapters_only)
    if not hooks.on_cpu:
        hooks.around(SYMBOLS[1], init_with_experts_on_host)


def load_adapters_only(
    original: Callable[..., None], pool: Any, uid: str | None, buffer_id: int, lora_adapter: Any, *args: Any
) -> None:
    if lora_adapter is not None:
        load_clearing_base(original, pool, uid, buffer_id, lora_adapter, *args)


def load_clearing_base(
    original: Callable[..., None], pool: Any, uid: str | None, buffer_id: int, lora_adapter: Any, *args: Any
) -> None:
    if isinstance(lora_adapter, InstalledAdapter):
        fill_slot(pool, buffer_id, lora_adapter)
    else:
        original(pool, uid, buffer_id, lora_adapter, *args)


def fill_slot(pool: Any, slot: int, adapter: InstalledAdapter) -> None:
    """Copies `adapter` into `slot` and zeroes all modules that the adapter does not change.

    If the adapter changes no experts, expert buffers keep their old content: the expert layer skips such an adapter.
    """
    for copy in copies_into(pool, slot, adapter):
        copy()


def copies_into(pool: Any, slot: int, adapter: InstalledAdapter) -> list[Callable[[], None]]:
    """The parts of `fill_slot`, one for each fused linear of a layer, in any order or at once."""
    buffers = [
        (name, layer, a[slot], b[slot])
        for name in pool.A_buffer
        for layer, (a, b) in enumerate(zip(pool.A_buffer[name], pool.B_buffer[name], strict=True))
    ]

    def copy(name: str, layer: int, a: torch.Tensor, b: torch.Tensor) -> None:
        weight = adapter.weights.get((name, layer))
        if weight is not None:
            _fill(a, b, weight, adapter.config.r, pool.max_lora_rank)
        elif a.dim() == 2 or adapter.adapts_experts:
            a.zero_()
            b.zero_()

    others = (pool.embedding_A_buffer, pool.embedding_B_buffer, pool.lm_head_A_buffer, pool.lm_head_B_buffer)
    zeroed = [buffer[slot].zero_ for each in others for buffer in each.values()]
    return [*(partial(copy, *each) for each in buffers), *zeroed]


def _fill(a: torch.Tensor, b: torch.Tensor, weight: FusedLora, rank: int, max_rank: int) -> None:
    """Parts of A are contiguous for dense linears; for experts, each part starts at a multiple of `max_rank`."""
    if a.dim() == 2:
        a[: weight.parts * rank].copy_(weight.a)
    else:
        for part in range(weight.parts):
            source = weight.a[:, part * rank : (part + 1) * rank]
            a[:, part * max_rank : part * max_rank + rank].copy_(source)
    b[..., :rank].copy_(weight.b)


def init_with_experts_on_host(original: Callable[..., None], pool: Any, base_model: Any) -> None:
    """SGLang's `init_buffers`, with the four-dimensional buffers in host memory if the store computes the experts."""
    if any(hasattr(module, "experts_forward") for module in base_model.modules()):
        with ExpertBuffersOnHost():
            original(pool, base_model)
    else:
        original(pool, base_model)


class ExpertBuffersOnHost(TorchFunctionMode):
    """In this context `torch.zeros` of four dimensions allocates on the CPU, whatever device the caller requests."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.zeros and args and isinstance(args[0], tuple) and len(args[0]) == 4:
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)
