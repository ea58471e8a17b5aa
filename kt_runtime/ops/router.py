"""The router: chooses each token's experts. T tokens, H hidden, E experts, K experts per token.

DeepSeek: logits in float32 from bf16 hidden states and weights, as Hugging Face's `DeepseekV3TopkRouter` computes them.
Qwen3-MoE: logits in the model's dtype, routing weights in float32, as SGLang 0.5.23 computes them
(`sglang.srt.layers.moe.topk.fused_topk_torch_native`).
"""

from __future__ import annotations

import torch

from kt_runtime.ops.matmul import product


def float32_logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[T, H], [E, H] -> float32 [T, E]; a token's logits do not depend on the other tokens."""
    return product(hidden.float(), weight.float().T)


def softmax_top_k(logits: torch.Tensor, top_k: int, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [T, E] -> routing weights float32 [T, K] and expert ids [T, K]. `normalise`: the K weights sum to 1."""
    weights, ids = torch.topk(logits.float().softmax(-1), top_k, dim=-1)
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, ids
