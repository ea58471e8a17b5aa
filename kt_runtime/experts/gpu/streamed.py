"""A layer's experts on the device, with weights that stream through the ring: forward and backward.

The products of a chunk of experts run while the next chunk is being copied. Experts without a token are not loaded. The
outputs of all pairs are kept until the last chunk, then added up for each token in the order of its experts in `ids`:
the order of a sum does not depend on chunks. One copy to the host a call says where the rows of each expert end, and
whether a value is out of range.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor

from kt_runtime.errors import InvalidValueError
from kt_runtime.experts.gpu.adapters import AdapterRows, adapter_rows
from kt_runtime.experts.gpu.call import ACTIVATIONS, ExpertCall
from kt_runtime.experts.gpu.pairs import Pairs, checked_ends, sizes_of, sorted_pairs, sum_of_pairs, weighted_sum
from kt_runtime.experts.gpu.ring import ExpertRing, UnpackingLayer
from kt_runtime.experts.gpu.routed_mlp import ExpertWeights, expert_backward, expert_forward
from kt_runtime.experts.values import ExpertGradients, LoraSlot


@dataclass(frozen=True)
class StreamedActivations:
    """What a streamed forward pass keeps for backward: gate and up [R, 2I] of each chunk of a ring."""

    ring: ExpertRing
    gate_up: list[Tensor]

    @property
    def bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.gate_up)


@dataclass(frozen=True)
class _Rows:
    """One chunk: its rows of the sorted pairs, their tokens, and the adapters on them."""

    rows: slice
    tokens: Tensor
    weights: ExpertWeights
    adapters: Sequence[AdapterRows | None]


@torch.no_grad()
def forward(
    ring: ExpertRing, layer: UnpackingLayer, call: ExpertCall, out: Tensor | None, *, retain: bool
) -> tuple[Tensor, StreamedActivations | None]:
    """ExpertLayer.forward; the result is ready in the order of the current stream."""
    call.check(ring.shape)
    if out is None:
        out = torch.empty_like(call.x, memory_format=torch.contiguous_format)
    call.require("out", out, (call.x.dtype,), tuple(call.x.shape))
    pairs = sorted_pairs(call.ids, ring.shape.num_experts)
    ends = checked_ends(pairs, call.checks(ring.shape.num_experts))
    outputs = torch.zeros(call.ids.numel(), ring.shape.hidden, dtype=call.x.dtype, device=call.x.device)
    kept: list[Tensor] = []
    with closing(_chunks(ring, layer, call, pairs, ends)) as chunks:
        for chunk in chunks:
            outputs[chunk.rows], gate_up = expert_forward(chunk.weights, call.x[chunk.tokens], chunk.adapters)
            if retain:
                kept.append(gate_up)
    weighted_sum(outputs, pairs, call.weights, out)
    return out, StreamedActivations(ring, kept) if retain else None


@torch.no_grad()
def backward(
    ring: ExpertRing,
    layer: UnpackingLayer,
    grad_out: Tensor,
    call: ExpertCall,
    into: Sequence[LoraSlot | None] | None,
    kept: StreamedActivations | None,
) -> ExpertGradients:
    """ExpertLayer.backward. `kept`: those of `forward` with the same call. If None, or from another ring, they are
    computed again."""
    call.check(ring.shape)
    call.require("grad_out", grad_out, ACTIVATIONS, tuple(call.x.shape))
    gradients = _slot_gradients(call.slots, into)
    pairs = sorted_pairs(call.ids, ring.shape.num_experts)
    ends = checked_ends(pairs, call.checks(ring.shape.num_experts, grad_out))
    flat_weights = call.weights.reshape(-1)
    by_rows = torch.zeros(call.ids.numel(), ring.shape.hidden, dtype=torch.float32, device=call.x.device)
    by_weights = torch.zeros_like(flat_weights)
    known = iter(kept.gate_up) if kept is not None and kept.ring is ring else None
    with closing(_chunks(ring, layer, call, pairs, ends)) as chunks:
        for chunk in chunks:
            order = pairs.order[chunk.rows]
            by_rows[chunk.rows], by_weights[order] = expert_backward(
                chunk.weights,
                call.x[chunk.tokens],
                grad_out[chunk.tokens],
                flat_weights[order],
                chunk.adapters,
                gradients,
                None if known is None else next(known),
            )
    by_x = torch.empty_like(call.x, memory_format=torch.contiguous_format)
    sum_of_pairs(by_rows, pairs, by_x)
    return ExpertGradients(by_x, by_weights.view(call.weights.shape), gradients)


def _chunks(
    ring: ExpertRing, layer: UnpackingLayer, call: ExpertCall, pairs: Pairs, ends: Sequence[int]
) -> Generator[_Rows, None, None]:
    live = [expert for expert, size in enumerate(sizes_of(ends)) if size]
    if not live:
        return
    on_device = torch.tensor([ends[expert] for expert in live], dtype=torch.int32).to(call.x.device)
    tokens, begin, place = pairs.tokens, 0, 0
    with closing(ring.chunks(layer, live)) as loaded:
        for chunk in loaded:
            own = [ends[expert] - begin for expert in chunk.experts]
            rows = slice(begin, begin + own[-1])
            weights = ExpertWeights(chunk.w13, chunk.w2, own, on_device[place : place + len(own)] - begin)
            adapters = adapter_rows(call.slots, call.token_slots, tokens[rows], chunk.experts, own)
            yield _Rows(rows, tokens[rows], weights, adapters)
            begin, place = rows.stop, place + len(own)


def _slot_gradients(slots: Sequence[LoraSlot | None], into: Sequence[LoraSlot | None] | None) -> list[LoraSlot | None]:
    """Float32 tensors to which gradients are added: `into`, or zeros on the devices of the slots' tensors."""
    given = [None] * len(slots) if into is None else into
    if len(given) != len(slots):
        raise InvalidValueError(f"into has {len(given)} entries for {len(slots)} slots")
    return [g if g is not None or slot is None else _zeros(slot) for slot, g in zip(slots, given, strict=True)]


def _zeros(slot: LoraSlot) -> LoraSlot:
    return slot.with_tensors([None if t is None else torch.zeros_like(t, dtype=torch.float32) for t in slot.tensors()])
