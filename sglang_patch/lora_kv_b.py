"""LoRA on `kv_b_proj` of multi-head latent attention, on a machine without a GPU.

Symbols (SGLang 0.5.23): `sglang.srt.lora.deepseek_mla_correction.apply_q_correction` and `.apply_v_correction`.
Reason: absorbed attention never calls `kv_b_proj`. Its two halves are multiplied into the query and into the
attention's output as per-head matrices W_k and W_v, so SGLang adds the LoRA delta beside these two products, with a
Triton kernel. This is the same sum in torch; only on a machine without CUDA.

Shapes: T tokens, N heads, D latent size (`kv_lora_rank`), K and V head sizes without the rotary part, R rank.
`kv_b_proj` has A [R, D] and B [N * (K + V), R]; of each head's rows, K belong to W_k and V to W_v, W = B A:

    query   [T, N, D] += scaling * (q_nope [T, N, K] @ B_k [N, K, R]) @ A [R, D]
    output  [T, N, V] += scaling * (latent [T, N, D] @ A.T [D, R]) @ B_v.T [N, R, V]
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from kt_runtime.sglang_patch.hooks import Hooks

MODULE = "sglang.srt.lora.deepseek_mla_correction"
SYMBOLS = (f"{MODULE}.apply_q_correction", f"{MODULE}.apply_v_correction")


def install(hooks: Hooks) -> None:
    if not hooks.on_cpu:
        return
    hooks.replace(SYMBOLS[0], apply_q_correction)
    hooks.replace(SYMBOLS[1], apply_v_correction)


def apply_q_correction(attention: Any, q_nope: torch.Tensor, q_nope_out: torch.Tensor) -> torch.Tensor:
    """Adds the adapters' part to the absorbed query `q_nope_out` [T, N, D], in place, and returns it."""
    for rows, a, b, scaling in _segments(attention):
        b_k = b[:, : attention.qk_nope_head_dim]
        reduced = torch.bmm(q_nope[rows].transpose(0, 1), b_k)
        q_nope_out[rows].transpose(0, 1).add_(reduced @ a, alpha=scaling)
    return q_nope_out


def apply_v_correction(attention: Any, attn_output: torch.Tensor, attn_bmm_flat: torch.Tensor) -> torch.Tensor:
    """Adds the adapters' part to the attention's output `attn_bmm_flat` [T, N * V], in place, and returns it."""
    heads = attn_bmm_flat.view(-1, attention.num_local_heads, attention.v_head_dim)
    for rows, a, b, scaling in _segments(attention):
        b_v = b[:, attention.qk_nope_head_dim :]
        reduced = attn_output[rows].transpose(0, 1) @ a.T
        heads[rows].transpose(0, 1).add_(torch.bmm(reduced, b_v.transpose(1, 2)), alpha=scaling)
    return attn_bmm_flat


def _segments(attention: Any) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor, float]]:
    """(rows of the batch, A [R, D], B [N, K + V, R], scaling) of each run of tokens that has an adapter."""
    layer = attention.kv_b_proj
    batch = layer.lora_backend.get_batch_info()
    if batch is None or not getattr(layer, "set_lora", False):
        return
    head_rows = attention.qk_nope_head_dim + attention.v_head_dim
    start = 0
    for slot, length in zip(batch.weight_indices_cpu.tolist(), batch.seg_lens_cpu.tolist(), strict=True):
        rank = int(batch.lora_ranks_cpu[slot])
        if rank > 0 and length > 0:
            a = layer.A_buffer[slot, :rank]
            b = layer.B_buffer[slot, :, :rank].unflatten(0, (-1, head_rows))
            yield slice(start, start + length), a, b, float(batch.scalings_cpu[slot])
        start += length
