"""LoRA in the native step (`cpu/step.py`): SGLang's LoRA pool as the step reads it, and the adapters of a batch.

Symbols (SGLang 0.5.23), only read: `LoRAManager.memory_pool`, `.lora_backend`, `.embed_tokens_module`,
`.experts_shared_outer_loras`, `LoRAMemoryPool.A_buffer` and `.B_buffer`. SGLang allocates the pool's buffers when the
server starts. For each batch it decides which adapter has which slot, and copies an adapter that has none yet into a
slot (`pool.py`), in the scheduler's thread before the forward pass; `slots.py` fills free ones earlier. The step
therefore keeps pointers to the buffers. It gets the slots, ranks and factors of each batch, the same that SGLang's
modules use. Reason: a batch with adapters on SGLang's modules takes more than twice the time of one without, most of it
between the products.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from kt_runtime.experts.step import NO_LORA, AdapterRows, BatchLora, ExpertAdapter, LayerLora, LoraPool
from kt_runtime.sglang_patch.lora.linear import segments

BACKEND = "torch_native"
SYMBOLS = (
    "sglang.srt.lora.lora_manager.LoRAManager.memory_pool",
    "sglang.srt.lora.lora_manager.LoRAManager.lora_backend",
    "sglang.srt.lora.lora_manager.LoRAManager.embed_tokens_module",
    "sglang.srt.lora.lora_manager.LoRAManager.experts_shared_outer_loras",
    "sglang.srt.lora.mem_pool.LoRAMemoryPool.A_buffer",
    "sglang.srt.lora.mem_pool.LoRAMemoryPool.B_buffer",
)
MLP = {"gate_up_proj": "mlp_gate_up", "down_proj": "mlp_down"}
ATTENTION = {
    "qkv_proj": "qkv",
    "fused_qkv_a_proj_with_mqa": "compress",
    "kv_a_proj_with_mqa": "compress",
    "q_b_proj": "query",
    "q_proj": "query",
    "kv_b_proj": "kv_b",
    "o_proj": "out",
}
DELTA = {"in_proj_qkvz": "inputs", "in_proj_ba": "gates", "out_proj": "out"}
EXPERTS = {"gate_up_proj_moe": "gate_up", "down_proj_moe": "down"}
"""The pool's names, and those of `LayerLora`. A model's pool has one name of each pair (`whole_queries.py`)."""


def why_not(manager: Any) -> str:
    """Why the step can't run batches with adapters; empty if it can. `manager`: SGLang's LoRAManager, or None."""
    if manager is None:
        return "LoRA is off"
    if manager.lora_backend.name != BACKEND:
        return f"the LoRA backend is {manager.lora_backend.name}"
    if manager.embed_tokens_module is not None:
        return "LoRA adapts the embedding"
    if manager.experts_shared_outer_loras:
        return "the experts share factors of LoRA"
    others = sorted(set(manager.memory_pool.A_buffer) - {*ATTENTION, *DELTA, *MLP, *EXPERTS})
    return f"LoRA adapts {', '.join(others)}" if others else ""


def lora_pool(manager: Any, delta: Collection[int] = ()) -> LoraPool | None:
    """The pool's buffers, in place; None where `why_not` has a reason. The layers `delta` are Gated DeltaNet: the pool
    has their buffers and attention's for all layers, of which each layer uses its own."""
    if why_not(manager):
        return None
    pool = manager.memory_pool
    # SGLang wraps the layers of routed experts only if both of their linear layers are targets.
    shared = MLP | (EXPERTS if set(EXPERTS) <= set(pool.A_buffer) else {})
    layers = []
    for layer in range(pool.num_layer):
        tensors: dict[str, torch.Tensor] = {}
        for name, ours in (shared | (DELTA if layer in delta else ATTENTION)).items():
            if name in pool.A_buffer:
                tensors[f"{ours}_a"], tensors[f"{ours}_b"] = pool.A_buffer[name][layer], pool.B_buffer[name][layer]
        layers.append(LayerLora(**tensors))
    return LoraPool(slots=pool.max_loras_per_batch, rank=pool.max_lora_rank, layers=layers)


def addresses(manager: Any) -> list[int]:
    """Where the pool's buffers lie."""
    pool = manager.memory_pool
    buffers: list[list[torch.Tensor]] = [*pool.A_buffer.values(), *pool.B_buffer.values()]
    return [tensor.data_ptr() for layers in buffers for tensor in layers]


def batch_lora(manager: Any) -> BatchLora:
    """The adapters of the batch that SGLang prepared last."""
    backend = manager.lora_backend
    prepared = backend.get_batch_info()
    if prepared is None:
        return NO_LORA
    rows = [
        AdapterRows(part.rows.start, part.rows.stop - part.rows.start, part.slot, part.rank, part.scaling)
        for part in segments(prepared)
    ]
    routed = backend.expert_batch
    experts = [ExpertAdapter(use.slot, use.rank, use.scaling) for use in routed.slots]
    return BatchLora(rows, experts, routed.token_slots)
