"""Absorbed latent attention (MLA) on an accelerator that runs none of CUDA's kernels, with SGLang's `torch_native`.

Symbols (SGLang 0.5.23): `models.deepseek_common.attention_backend_handler.AttentionBackendRegistry` selects absorbed
MLA for DeepSeek with this backend, registered before `ModelRunner.init_attention_backends`. Reason: the backend has no
handler, so DeepSeek would run its MHA path on the latent KV, whose rows have another width.
"""

from __future__ import annotations

from typing import Any

from kt_runtime.sglang_patch.hooks import Hooks
from kt_runtime.sglang_patch.options import ACCELERATOR_ATTENTION

SYMBOLS = (
    "sglang.srt.model_executor.model_runner.ModelRunner.init_attention_backends",
    "sglang.srt.models.deepseek_common.attention_backend_handler.AttentionBackendRegistry.register",
)


def install(hooks: Hooks) -> None:
    if not hooks.on_cpu and not hooks.has_cuda_kernels:
        hooks.before(SYMBOLS[0], _register)


def _register(*args: Any, **kwargs: Any) -> None:
    """Called late, because the registry imports SGLang's models."""
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry, AttnForwardMethod

    AttentionBackendRegistry.register(ACCELERATOR_ATTENTION, lambda attention, batch: AttnForwardMethod.MLA)
