"""LoRA on `kv_b_proj` of multi-head latent attention (MLA) in absorbed order (DeepSeek-V2, arXiv:2405.04434, 2.1.2).

Absorbed attention never multiplies by `kv_b_proj` as a whole. The two halves of `kv_b_proj` are per-head matrices W_k
and W_v: the query is multiplied by W_k, the attention output by W_v. LoRA adds a term to each of these two products.

Shapes: T tokens, N heads, D latent size (`kv_lora_rank`), K size of a head's key without the rotary part, V size of a
head's value, R LoRA rank. A is [R, D], B is [N * (K + V), R]. The update is W = B A. Of each head's rows of B, the
first K belong to W_k and the other V to W_v:

    query   [T, N, D] += scaling * (query_nope [T, N, K] @ B_k [N, K, R]) @ A [R, D]
    output  [T, N, V] += scaling * (latent [T, N, D] @ A.T [D, R]) @ B_v.T [N, R, V]

The first product is rounded to the model's dtype, and so is the sum (`ops.matmul.lora_product`).
"""

from __future__ import annotations

import torch

from kt_runtime.ops.matmul import served_product


def halves(b: torch.Tensor, num_heads: int, key_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """B [N * (K + V), R] -> views [N, K, R] and [N, V, R]. Also splits `kv_b_proj`'s weight, with D in place of R."""
    by_head = b.unflatten(0, (num_heads, -1))
    return by_head[:, :key_size], by_head[:, key_size:]


def low_query(query_nope: torch.Tensor, b_k: torch.Tensor) -> torch.Tensor:
    """The first product of the query's term: query_nope [T, N, K], b_k [N, K, R] -> [T, N, R]."""
    return served_product(query_nope.transpose(0, 1), b_k).transpose(0, 1)


def query_with(absorbed: torch.Tensor, low: torch.Tensor, a: torch.Tensor, scaling: float) -> torch.Tensor:
    """The absorbed query [T, N, D] with LoRA's term: low [T, N, R] of `low_query`, a [R, D] -> [T, N, D]."""
    rows = served_product(low.flatten(0, 1), a, alpha=scaling, base=absorbed.flatten(0, 1))
    return rows.unflatten(0, low.shape[:2])


def low_output(latent: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """The first product of the output's term: latent [T, N, D], a [R, D] -> [T, N, R]."""
    return served_product(latent.flatten(0, 1), a.T).unflatten(0, latent.shape[:2])


def output_with(out: torch.Tensor, low: torch.Tensor, b_v: torch.Tensor, scaling: float) -> torch.Tensor:
    """The output [T, N, V] with LoRA's term: low [T, N, R] of `low_output`, b_v [N, V, R] -> [T, N, V]."""
    by_head = served_product(low.transpose(0, 1), b_v.mT, alpha=scaling, base=out.transpose(0, 1))
    return by_head.transpose(0, 1)
