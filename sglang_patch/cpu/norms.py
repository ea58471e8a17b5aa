"""RMSNorm with Hugging Face's rounding, where no CUDA kernel runs.

Symbols (SGLang 0.5.23):

- `layers.layernorm.RMSNorm.forward_native`: SGLang normalises the float32 sum of hidden state and residual and rounds
  once, after multiplying by the weight. Hugging Face, and therefore the training twin, rounds the sum to the model's
  dtype first and rounds the normalised state again before the weight. In bf16 this difference alone occasionally routes
  a token to other experts. Training would then use probabilities that serving never computed.
- `models.minimax_m2.MiniMaxM2QKRMSNorm.forward`: MiniMax-M2's norms of all of a token's queries and of its keys.
  SGLang has kernels of Triton for them, and one for CPUs with AMX, which is not in its wheel.
"""

from __future__ import annotations

from typing import Any

import torch

from kt_runtime.ops.norms import add_rms_norm
from kt_runtime.sglang_patch.hooks import Hooks
from kt_runtime.sglang_patch.ranks.norms import heads_norm

SYMBOLS = (
    "sglang.srt.layers.layernorm.RMSNorm.forward_native",
    "sglang.srt.models.minimax_m2.MiniMaxM2QKRMSNorm.forward",
)


def install(hooks: Hooks) -> None:
    if not hooks.has_cuda_kernels:
        hooks.around(SYMBOLS[0], _forward)
        hooks.replace(SYMBOLS[1], _normalise_queries_and_keys)


def _forward(
    original: Any,
    norm: Any,
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    post_residual_addition: torch.Tensor | None = None,
    quant_linear: Any = None,
) -> Any:
    special = norm.fp32_residual or norm.variance_size_override is not None or norm.override_orig_dtype is not None
    if special or post_residual_addition is not None:
        return original(norm, x, residual, post_residual_addition, quant_linear)
    if residual is None:
        return heads_norm(x, norm.weight, norm.variance_epsilon)
    return add_rms_norm(x, residual, norm.weight, norm.variance_epsilon)


def _normalise_queries_and_keys(norms: Any, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, N D] and [T, K D], parts of one tensor, each with its norm."""
    pairs = ((norms._q_norm, q), (norms._k_norm, k))
    query, key = (heads_norm(x.contiguous(), norm.weight, norm.variance_epsilon) for norm, x in pairs)
    return query, key
