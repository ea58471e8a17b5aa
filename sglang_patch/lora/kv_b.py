"""LoRA on `kv_b_proj` of multi-head latent attention, where no CUDA kernel runs.

Symbols (SGLang 0.5.23): `sglang.srt.lora.deepseek_mla_correction.apply_q_correction` and `.apply_v_correction`,
replaced only without CUDA. Reason: absorbed attention never calls `kv_b_proj`. SGLang adds the LoRA delta
to the two products with the halves of `kv_b_proj`, in a Triton kernel. Here `kt_runtime.ops.mla` computes the delta;
that module documents the formulas and the shapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from kt_runtime.ops import mla
from kt_runtime.sglang_patch.hooks import Hooks
from kt_runtime.sglang_patch.lora.linear import segments

MODULE = "sglang.srt.lora.deepseek_mla_correction"
SYMBOLS = (f"{MODULE}.apply_q_correction", f"{MODULE}.apply_v_correction")


def install(hooks: Hooks) -> None:
    if hooks.has_cuda_kernels:
        return
    hooks.replace(SYMBOLS[0], apply_q_correction)
    hooks.replace(SYMBOLS[1], apply_v_correction)


def apply_q_correction(attention: Any, q_nope: torch.Tensor, q_nope_out: torch.Tensor) -> torch.Tensor:
    """Adds the LoRA delta to the absorbed query `q_nope_out` [T, N, D] in place and returns `q_nope_out`."""
    for rows, a, (b_k, _), scaling in _segments(attention):
        q_nope_out[rows] = mla.query_with(q_nope_out[rows], mla.low_query(q_nope[rows], b_k), a, scaling)
    return q_nope_out


def apply_v_correction(attention: Any, attn_output: torch.Tensor, attn_bmm_flat: torch.Tensor) -> torch.Tensor:
    """Adds the LoRA delta to the attention's output `attn_bmm_flat` [T, N * V] in place and returns `attn_bmm_flat`."""
    heads = attn_bmm_flat.view(-1, attention.num_local_heads, attention.v_head_dim)
    for rows, a, (_, b_v), scaling in _segments(attention):
        heads[rows] = mla.output_with(heads[rows], mla.low_output(attn_output[rows], a), b_v, scaling)
    return attn_bmm_flat


Halves = tuple[torch.Tensor, torch.Tensor]


def _segments(attention: Any) -> Iterator[tuple[slice, torch.Tensor, Halves, float]]:
    """(rows of the batch, A [R, D], halves of B, scaling) of each run of consecutive tokens with one adapter."""
    layer = attention.kv_b_proj
    batch = layer.lora_backend.get_batch_info()
    if batch is None or not getattr(layer, "set_lora", False):
        return
    for segment in segments(batch):
        a = layer.A_buffer[segment.slot, : segment.rank]
        b = layer.B_buffer[segment.slot, :, : segment.rank]
        halves = mla.halves(b, attention.num_local_heads, attention.qk_nope_head_dim)
        yield segment.rows, a, halves, segment.scaling
