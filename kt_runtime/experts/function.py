"""Routed experts as one autograd operation.

Between forward and backward, the operation keeps the layer's activations, or only the inputs to save memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from kt_runtime.experts.collected import Place, place_of
from kt_runtime.experts.values import ExpertGradients, LoraSlot


class Differentiated(Protocol):
    """`ExpertLayer`, or another layer with its passes (`kt_runtime.ranks.TrainedExperts`)."""

    def forward(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        *,
        slots: Sequence[LoraSlot | None] = (),
        token_slots: Tensor | None = None,
    ) -> Tensor: ...

    def forward_retaining(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        *,
        slots: Sequence[LoraSlot | None] = (),
        token_slots: Tensor | None = None,
    ) -> tuple[Tensor, Any]: ...

    def backward(
        self,
        grad_out: Tensor,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        *,
        slots: Sequence[LoraSlot | None] = (),
        token_slots: Tensor | None = None,
        into: Sequence[LoraSlot | None] | None = None,
        retained: Any = None,
    ) -> ExpertGradients: ...


class _RoutedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        layer: Differentiated,
        lora: LoraSlot | None,
        compute: bool,
        retain: bool,
        place: Place | None,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        *lora_tensors: Tensor | None,
    ) -> Tensor:
        ctx.layer, ctx.lora = layer, None if lora is None else lora.with_tensors([None] * len(lora_tensors))
        ctx.save_for_backward(x, ids, weights, *lora_tensors)
        ctx.retained, ctx.place = None, place
        if not compute:
            return torch.zeros_like(x, memory_format=torch.contiguous_format)
        slots = _slot_arguments(lora, lora_tensors, x)
        if not retain:
            return layer.forward(x, ids, weights, **slots)
        out, ctx.retained = layer.forward_retaining(x, ids, weights, **slots)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads_out: Tensor) -> tuple[Any, ...]:
        x, ids, weights, *lora_tensors = ctx.saved_tensors
        grad_out = grads_out[0]
        if grad_out.stride(-1) != 1:
            grad_out = grad_out.contiguous()
        slots = _slot_arguments(ctx.lora, tuple(lora_tensors), x)
        into = None if ctx.place is None else [ctx.place.collected.slot(ctx.place, slots["slots"][0])]
        grads = ctx.layer.backward(grad_out, x, ids, weights, **slots, into=into, retained=ctx.retained)
        ctx.retained = None  # a second backward recomputes the activations
        slot = grads.slots[0] if grads.slots and ctx.place is None else None
        lora_grads = [None] * len(lora_tensors) if slot is None else slot.tensors()
        return (
            None,
            None,
            None,
            None,
            None,
            grads.x,
            None,
            grads.weights,
            *(None if g is None else g.to(t.dtype) for g, t in zip(lora_grads, lora_tensors, strict=True)),
        )


def routed_experts(
    layer: Differentiated, x: Tensor, ids: Tensor, weights: Tensor, lora: LoraSlot | None, *, retain: bool = True
) -> Tensor:
    """ExpertLayer.forward with gradients for x, weights and the tensors of `lora`, each in its own dtype.

    x [T, H], ids [T, K], weights [T, K] float32; `lora` applies to every token. Not twice differentiable. retain: keep
    the activations, which about halves the cost of backward. Nothing is kept if no gradient is needed.
    """
    tensors = () if lora is None else lora.tensors()
    wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weights, *tensors))
    return _RoutedExperts.apply(layer, lora, True, retain and wanted, place_of(*tensors), x, ids, weights, *tensors)


def routed_experts_for_backward(
    layer: Differentiated, x: Tensor, ids: Tensor, weights: Tensor, lora: LoraSlot | None
) -> Tensor:
    """`routed_experts` without forward: the result is zeros [T, H], the gradients are bit-identical to the real ones.

    For activation recomputation: backward needs gate and up only, and computes these itself. The skipped down
    projection is a third of forward's work.
    """
    tensors = () if lora is None else lora.tensors()
    return _RoutedExperts.apply(layer, lora, False, False, place_of(*tensors), x, ids, weights, *tensors)


def _slot_arguments(lora: LoraSlot | None, tensors: tuple[Tensor | None, ...], x: Tensor) -> dict[str, Any]:
    if lora is None:
        return {}
    token_slots = torch.zeros(x.shape[0], dtype=torch.int32, device=x.device)
    return {"slots": [lora.with_tensors(tensors)], "token_slots": token_slots}
