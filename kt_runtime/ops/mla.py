"""LoRA on `kv_b_proj` of multi-head latent attention (MLA) in absorbed order (DeepSeek-V2, arXiv:2405.04434, 2.1.2).

Absorbed attention never multiplies with `kv_b_proj` itself. Its two halves are per-head matrices W_k and W_v: W_k goes
into the query, W_v behind the sum over the values. LoRA adds its part beside these two products.

Shapes: T tokens, N heads, D latent size (`kv_lora_rank`), K and V sizes of a head's key without the rotary part and of
its value, R LoRA rank. A is [R, D] and B [N * (K + V), R]; of each head's rows, K belong to W_k and V to W_v, W = B A:

    query   [N, T, D] += scaling * (query_nope [N, T, K] @ B_k [N, K, R]) @ A [R, D]
    output  [N, T, V] += scaling * (latent [N, T, D] @ A.T [D, R]) @ B_v.T [N, R, V]

Both products are rounded to the model's dtype, as serving has them; a scaling is applied when the part is added.
"""

from __future__ import annotations

import torch

from kt_runtime.ops.matmul import served_product


def halves(b: torch.Tensor, num_heads: int, key_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """B [N * (K + V), R], or `kv_b_proj`'s weight itself with D for R -> views [N, K, R] and [N, V, R]."""
    by_head = b.unflatten(0, (num_heads, -1))
    return by_head[:, :key_size], by_head[:, key_size:]


def query_delta(query_nope: torch.Tensor, a: torch.Tensor, b_k: torch.Tensor) -> torch.Tensor:
    """LoRA's part of the absorbed query, without its scaling: [N, T, K], [R, D], [N, K, R] -> [N, T, D]."""
    low = served_product(query_nope, b_k)
    return served_product(low.flatten(0, 1), a).unflatten(0, low.shape[:2])


def output_delta(latent: torch.Tensor, a: torch.Tensor, b_v: torch.Tensor) -> torch.Tensor:
    """LoRA's part of the output, without its scaling: [N, T, D], [R, D], [N, V, R] -> [N, T, V]."""
    low = served_product(latent.flatten(0, 1), a.T).unflatten(0, latent.shape[:2])
    return served_product(low, b_v.mT)
