"""LoRA on linear layers where no CUDA kernel runs, with kt-runtime's products.

Symbols (SGLang 0.5.23): `lora.backend.torch_backend.sgemm_lora_a_fwd` and `.sgemm_lora_b_fwd`, which the backend
`torch_native` calls for every linear layer with LoRA. Reason: PyTorch's products sum in an order that depends on the
number of tokens. The training twin calls the same function (`kt_runtime.ops.matmul.served_product`).

`skip_inactive_lora_batches` is an attribute of SGLang's backends: batches without an adapter are then not prepared, and
their layers are computed as if there were no LoRA. Reason: preparing a batch of one token takes 0.4 ms.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from kt_runtime.ops.matmul import lora_product_into
from kt_runtime.sglang_patch.hooks import Hooks

BACKEND = "sglang.srt.lora.backend.torch_backend"
SYMBOLS = (
    f"{BACKEND}.sgemm_lora_a_fwd",
    f"{BACKEND}.sgemm_lora_b_fwd",
    f"{BACKEND}.TorchNativeLoRABackend.skip_inactive_lora_batches",
)


def install(hooks: Hooks) -> None:
    if not hooks.has_cuda_kernels:
        hooks.replace(SYMBOLS[0], lora_a)
        hooks.replace(SYMBOLS[1], lora_b)
        hooks.set(SYMBOLS[2], True)


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of a batch with one adapter. `slot`: of the adapter in the pool; `rank`: above 0."""

    rows: slice
    slot: int
    rank: int
    scaling: float


def segments(batch: Any) -> list[Segment]:
    """The segments of `batch`, SGLang's `TorchNativeLoRABatchInfo`; tokens without an adapter are left out.

    All layers of a batch ask for them: the list is kept with the batch, for the tensor from which it was made.
    """
    slots = batch.weight_indices_cpu
    made_from, found = getattr(batch, "kt_segments", (None, []))
    if made_from is not slots:
        found = _segments(slots.tolist(), batch)
        batch.kt_segments = (slots, found)
    return found


def _segments(slots: list[int], batch: Any) -> list[Segment]:
    found, start = [], 0
    ranks, scalings = batch.lora_ranks_cpu.tolist(), batch.scalings_cpu.tolist()
    for slot, length in zip(slots, batch.seg_lens_cpu.tolist(), strict=True):
        if ranks[slot] > 0 and length > 0:
            found.append(Segment(slice(start, start + length), slot, ranks[slot], scalings[slot]))
        start += length
    return found


def lora_a(inputs: torch.Tensor, weights: torch.Tensor, batch_info: Any, num_slices: int = 1) -> torch.Tensor:
    """scaling * x A^T: inputs [T, K], weights [slots, P * R, K] -> [T, P * R]: P parts of r columns, then zeros."""
    out = inputs.new_zeros(len(inputs), weights.shape[-2])
    for segment in segments(batch_info):
        columns = num_slices * segment.rank
        a = weights[segment.slot, :columns]
        lora_product_into(out[segment.rows, :columns], inputs[segment.rows], a.T, segment.scaling)
    return out


def lora_b(
    inputs: torch.Tensor,
    weights: torch.Tensor,
    batch_info: Any,
    slice_offsets: torch.Tensor,
    base_output: torch.Tensor | None = None,
) -> torch.Tensor:
    """Adds low B^T to `base_output` [T, N] in place, or to zeros: inputs [T, P * R] of `lora_a`, weights [slots, N, R].

    Part p has the columns from slice_offsets[p] to slice_offsets[p + 1] of the result.
    """
    offsets = slice_offsets.tolist()
    out = inputs.new_zeros(len(inputs), offsets[-1]) if base_output is None else base_output
    for segment in segments(batch_info):
        for part, (first, last) in enumerate(pairwise(offsets)):
            low = inputs[segment.rows, part * segment.rank : (part + 1) * segment.rank]
            b, place = weights[segment.slot, first:last, : segment.rank], out[segment.rows, first:last]
            lora_product_into(place, low, b.T, base=place)
    return out
