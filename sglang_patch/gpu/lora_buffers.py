"""SGLang allocates no routing buffers of its kernels for LoRA on experts that are in the store.

Symbol (SGLang 0.5.23): `BaseLoRABackend.init_cuda_graph_moe_buffers`. Reason: with graphs, SGLang allocates these
buffers for the first `FusedMoEWithLoRA` of the model, from the place and shape of its weights. kt-runtime's subclass
(`lora/experts.py`) has none, and the store needs none: SGLang would end at its start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kt_runtime.sglang_patch.hooks import Hooks

SYMBOLS = ("sglang.srt.lora.backend.base_backend.BaseLoRABackend.init_cuda_graph_moe_buffers",)


def install(hooks: Hooks) -> None:
    if not hooks.on_cpu:
        hooks.around(SYMBOLS[0], allocate_buffers)


def allocate_buffers(
    original: Callable[..., None],
    backend: Any,
    max_bs: int,
    max_loras: int,
    compute_dtype: Any,
    moe_layer: Any,
    **kwargs: Any,
) -> None:
    if not hasattr(moe_layer, "experts_forward"):
        original(backend, max_bs, max_loras, compute_dtype, moe_layer, **kwargs)
