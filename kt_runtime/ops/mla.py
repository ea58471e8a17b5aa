"""LoRA on `kv_b_proj` of multi-head latent attention (MLA) in absorbed order (DeepSeek-V2, arXiv:2405.04434, 2.1.2).

Absorbed attention never multiplies by `kv_b_proj` as a whole. The two halves of `kv_b_proj` are per-head matrices W_k
and W_v: the query is multiplied by W_k, the attention output by W_v. LoRA adds a term to each of these two products.

Shapes: T tokens, N heads, D latent size (`kv_lora_rank`), K size of a head's key without the rotary part, V size of a
head's value, R LoRA rank. A is [R, D], B is [N * (K + V), R]. The update is W = B A. Of each head's rows of B, the
first K belong to W_k and the other V to W_v:

    query   [N, T, D] += scaling * (query_nope [N, T, K] @ B_k [N, K, R]) @ A [R, D]
    output  [N, T, V] += scaling * (latent [N, T, D] @ A.T [D, R]) @ B_v.T [N, R, V]

Both products are rounded to the model's dtype, as in serving. The scaling is applied when the term is added.
"""

from __future__ import annotations

import torch

from kt_runtime.ops.matmul import served_product


def halves(b: torch.Tensor, num_heads: int, key_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """B [N * (K + V), R] -> views [N, K, R] and [N, V, R]. Also splits `kv_b_proj`'s weight, with D in place of R."""
    by_head = b.unflatten(0, (num_heads, -1))
    return by_head[:, :key_size], by_head[:, key_size:]


def query_delta(query_nope: torch.Tensor, a: torch.Tensor, b_k: torch.Tensor) -> torch.Tensor:
    """LoRA's term of the absorbed query, without the scaling: [N, T, K], [R, D], [N, K, R] -> [N, T, D]."""
    low = served_product(query_nope, b_k)
    return served_product(low.flatten(0, 1), a).unflatten(0, low.shape[:2])


def output_delta(latent: torch.Tensor, a: torch.Tensor, b_v: torch.Tensor) -> torch.Tensor:
    """LoRA's term of the output, without the scaling: [N, T, D], [R, D], [N, V, R] -> [N, T, V]."""
    low = served_product(latent.flatten(0, 1), a.T).unflatten(0, latent.shape[:2])
    return served_product(low, b_v.mT)
