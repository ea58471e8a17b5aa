"""LoRA on routed experts: the expert store computes it from the buffers of SGLang's LoRA memory pool.

Symbols (SGLang 0.5.23): `sglang.srt.lora.layers.get_lora_layer` returns kt-runtime's class instead of
`FusedMoEWithLoRA` for layers whose experts are in the store. A hook after `LoRAManager.prepare_lora_batch` records each
token's adapter. Reason: SGLang's class needs Triton, Marlin or CuTe kernels, which require expert weights on a GPU.

Under SGLang's captured graphs the experts are an eager break (`gpu/experts.py`). A break calls `adapters` each time
that it runs: the adapters, slots and tokens are those of the batch that is computed then, not of the capture. SGLang
prepares each batch before it replays a graph.

Legend: E experts, R highest rank of the server, r rank of the adapter, H hidden size, I intermediate size, T tokens.
Per slot the pool holds gate_up A [E, 2R, H] (gate in the rows from 0, up in the rows from R), gate_up B [E, 2I, R],
down A [E, R, I] and down B [E, H, R]. The adapter uses the first r of each R. The store gets views of these buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from kt_runtime import device
from kt_runtime.errors import ConflictError
from kt_runtime.experts import LoraSlot
from kt_runtime.sglang_patch.hooks import Hooks

SYMBOLS = (
    "sglang.srt.lora.layers.get_lora_layer",
    "sglang.srt.lora.lora_manager.LoRAManager.prepare_lora_batch",
    "sglang.srt.lora.layers.FusedMoEWithLoRA",
    "sglang.srt.lora.layers.BaseLayerWithLoRA",
    "sglang.srt.lora.utils.generate_sequence_lengths",
    "sglang.srt.distributed.tensor_model_parallel_all_reduce",
)


@dataclass(frozen=True, slots=True)
class SlotUse:
    """An adapter that a batch uses: its slot in the pool, its rank, and its factor for routed experts."""

    slot: int
    rank: int
    scaling: float


@dataclass(frozen=True, slots=True)
class ExpertBatch:
    """`token_slots`: int32 [T], each token's index into `slots`; -1 without LoRA on experts. On the model's device, if
    there are slots."""

    slots: tuple[SlotUse, ...]
    token_slots: torch.Tensor


def install(hooks: Hooks) -> None:
    hooks.around(SYMBOLS[0], lora_layer)
    hooks.after(SYMBOLS[1], note_expert_batch)


def lora_layer(original: Callable[..., Any], layer: Any, lora_backend: Any, **kwargs: Any) -> Any:
    if hasattr(layer, "experts_forward"):
        return layer_class()(layer, lora_backend)
    return original(layer, lora_backend, **kwargs)


def note_expert_batch(result: None, manager: Any, forward_batch: Any) -> None:
    from sglang.srt.lora.utils import generate_sequence_lengths

    if manager.lora_backend.get_batch_info() is None:  # no request of the batch has an adapter (`linear`)
        manager.lora_backend.expert_batch = None
        return
    lengths = generate_sequence_lengths(forward_batch, device="cpu")
    manager.lora_backend.expert_batch = expert_batch(manager, forward_batch.lora_ids, lengths)


def expert_batch(manager: Any, lora_ids: Sequence[str | None], lengths: torch.Tensor) -> ExpertBatch:
    """`lora_ids` and `lengths` (int tensor): adapter and number of tokens of each request of the batch, in order."""
    uses: dict[SlotUse, int] = {}
    indices = []
    for lora_id in lora_ids:
        use = _slot_use(manager, lora_id)
        indices.append(-1 if use is None else uses.setdefault(use, len(uses)))
    token_slots = torch.repeat_interleave(torch.tensor(indices, dtype=torch.int32), lengths)
    return ExpertBatch(tuple(uses), _on_device(token_slots, torch.device(manager.device)) if uses else token_slots)


_staged = device.PinnedBuffer()


def _on_device(token_slots: torch.Tensor, where: torch.device) -> torch.Tensor:
    """A copy of the host's `token_slots`, ordered by the current stream, for which the host does not wait."""
    if device.is_host(where):
        return token_slots
    pinned = _staged.like(token_slots)
    pinned.copy_(token_slots)
    with device.guard(where):
        copy = torch.empty_like(token_slots, device=where)
        copy.copy_(pinned, non_blocking=True)
        _staged.busy_until(device.recorded(device=where))
    return copy


def _slot_use(manager: Any, lora_id: str | None) -> SlotUse | None:
    adapter = manager.loras.get(lora_id)
    slot = manager.memory_pool.uid_to_buffer_id.get(lora_id)
    if adapter is None or slot is None or not getattr(adapter, "adapts_experts", True):
        return None
    # SGLang folds the factor into B when it copies its own adapters into the pool.
    return SlotUse(slot, adapter.config.r, getattr(adapter, "expert_scaling", 1.0))


@cache
def layer_class() -> type:
    from sglang.srt.distributed import tensor_model_parallel_all_reduce
    from sglang.srt.lora.layers import BaseLayerWithLoRA, FusedMoEWithLoRA

    class StoredExpertsWithLoRA(FusedMoEWithLoRA):
        """A `FusedMoE` whose experts are in the store, with the adapters of the batch.

        A subclass of `FusedMoEWithLoRA`, so that SGLang's manager and pool treat it in the same way. Attributes that it
        does not have are read from the wrapped layer.
        """

        def __init__(self, base_layer: Any, lora_backend: Any) -> None:
            BaseLayerWithLoRA.__init__(self, base_layer, lora_backend)
            self.tp_size, self.tp_rank = 1, 0
            self._uses_interleaved_gate_up = False
            self._slots: dict[SlotUse, LoraSlot] = {}

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("base_layer"), name)

        def forward(self, hidden_states: torch.Tensor, topk_output: Any, **kwargs: Any) -> torch.Tensor:
            result: torch.Tensor = self.base_layer.experts_forward(hidden_states, topk_output, self.adapters)
            if self.base_layer.reduce_results and self.base_layer.moe_ep_size > 1:  # as the layer itself: OLMoE's
                result = tensor_model_parallel_all_reduce(result)
            return result

        def adapters(self, num_tokens: int) -> tuple[Sequence[LoraSlot], torch.Tensor | None]:
            """The slots and each token's slot of the batch that SGLang prepared last; empty without LoRA on experts."""
            batch = getattr(self.lora_backend, "expert_batch", None)
            if self.lora_backend.get_batch_info() is None or batch is None or not batch.slots:
                return (), None
            if batch.token_slots.shape[0] != num_tokens:
                raise ConflictError(
                    f"the batch has {num_tokens} tokens, but LoRA was prepared for {batch.token_slots.shape[0]}; "
                    "data-parallel attention can't be used"
                )
            return tuple(self._slot(use) for use in batch.slots), batch.token_slots

        def _slot(self, use: SlotUse) -> LoraSlot:
            if use not in self._slots:
                self._slots[use] = self._views(use)
            return self._slots[use]

        def _views(self, use: SlotUse) -> LoraSlot:
            rank = use.rank
            gate_up_a, gate_up_b = self.gate_up_lora_a_weights[use.slot], self.gate_up_lora_b_weights[use.slot]
            highest, intermediate = gate_up_a.shape[1] // 2, gate_up_b.shape[1] // 2
            return LoraSlot(
                gate_a=gate_up_a[:, :rank],
                gate_b=gate_up_b[:, :intermediate, :rank],
                up_a=gate_up_a[:, highest : highest + rank],
                up_b=gate_up_b[:, intermediate:, :rank],
                down_a=self.down_lora_a_weights[use.slot, :, :rank],
                down_b=self.down_lora_b_weights[use.slot, :, :, :rank],
                scaling=use.scaling,
            )

    return StoredExpertsWithLoRA
