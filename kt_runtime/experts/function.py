"""Routed experts as one differentiable operation. Saved for backward: inputs only; activations are computed again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kt_runtime.experts.layer import ExpertLayer, LoraSlot


class _RoutedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        layer: ExpertLayer,
        scaling: float | None,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        *lora_tensors: Tensor | None,
    ) -> Tensor:
        ctx.layer, ctx.scaling = layer, scaling
        ctx.save_for_backward(x, ids, weights, *lora_tensors)
        return layer.forward(x, ids, weights, **_slot_arguments(scaling, lora_tensors, x))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads_out: Tensor) -> tuple[Any, ...]:
        x, ids, weights, *lora_tensors = ctx.saved_tensors
        grad_out = grads_out[0]
        if grad_out.stride(-1) != 1:
            grad_out = grad_out.contiguous()
        slots = _slot_arguments(ctx.scaling, tuple(lora_tensors), x)
        grads = ctx.layer.backward(grad_out, x, ids, weights, **slots)
        slot = grads.slots[0] if grads.slots else None
        lora_grads = [None] * len(lora_tensors) if slot is None else slot.tensors()
        return (
            None,
            None,
            grads.x,
            None,
            grads.weights,
            *(None if g is None else g.to(t.dtype) for g, t in zip(lora_grads, lora_tensors, strict=True)),
        )


def routed_experts(layer: ExpertLayer, x: Tensor, ids: Tensor, weights: Tensor, lora: LoraSlot | None) -> Tensor:
    """ExpertLayer.forward with gradients for x, weights and the tensors of `lora`, each in its own dtype.

    x [T, H], ids [T, K], weights [T, K] float32; `lora` applies to every token. Not twice differentiable.
    """
    tensors = () if lora is None else lora.tensors()
    return _RoutedExperts.apply(layer, None if lora is None else lora.scaling, x, ids, weights, *tensors)


def _slot_arguments(scaling: float | None, tensors: tuple[Tensor | None, ...], x: Tensor) -> dict[str, Any]:
    if scaling is None:
        return {}
    token_slots = torch.zeros(x.shape[0], dtype=torch.int32, device=x.device)
    return {"slots": [LoraSlot(scaling=scaling).with_tensors(tensors)], "token_slots": token_slots}
