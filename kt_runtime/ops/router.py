"""Which experts a token goes to. T tokens, H hidden, E experts, K experts per token.

DeepSeek's routers: Hugging Face computes their logits in float32 from bf16 hidden states and weights
(`DeepseekV3TopkRouter`). Qwen3-MoE's: logits in the model's dtype, routing weights that stay float32, as SGLang 0.5.23
has them (`sglang.srt.layers.moe.topk.fused_topk_torch_native`).
"""

from __future__ import annotations

import torch

from kt_runtime.ops.matmul import product


def float32_logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[T, H], [E, H] -> float32 [T, E]; a token's logits do not depend on the other tokens."""
    return product(hidden.float(), weight.float().T)


def softmax_top_k(logits: torch.Tensor, top_k: int, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Routing weights float32 [T, K], which sum to 1 where `normalise`, and ids [T, K], of logits [T, E]."""
    weights, ids = torch.topk(logits.float().softmax(-1), top_k, dim=-1)
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, ids
