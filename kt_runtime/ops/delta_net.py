"""What Qwen3-Next and Qwen3.5 compute other than attention, routers and SwiGLU, for serving and training alike: the
Gated DeltaNet rule (Yang et al. 2024, arXiv:2412.06464) with its short convolution, its gated norm, norms whose weight
is an offset from one, and sigmoid gates.

On a CPU kt-runtime's kernels compute all of it: a token's result depends on its sequence up to it alone. PyTorch's
sigmoid, as its silu (`ops.activation`), has two implementations that differ in the last bit.

Shapes: T tokens, HV value heads of V elements, C channels, G gates.
"""

from __future__ import annotations

from typing import Any

import torch

from kt_runtime.experts import dense
from kt_runtime.experts.attention import DeltaWeights, gated_delta, gated_delta_backward
from kt_runtime.ops.activation import silu_and_multiply
from kt_runtime.ops.norms import frozen_rms_norm, rms_norm


class _GatedDelta(torch.autograd.Function):
    """Backward computes the states again; forward saves the inputs alone."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, weights: DeltaWeights, sequences: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(x, a, b)
        ctx.weights, ctx.sequences = weights, sequences
        return gated_delta(x, a, b, weights, sequences)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, a, b = ctx.saved_tensors
        return (*gated_delta_backward(grads[0], x, a, b, ctx.weights, ctx.sequences), None, None)


def delta_rule(
    x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, weights: DeltaWeights, sequences: torch.Tensor
) -> torch.Tensor:
    """`experts.attention.gated_delta` of sequences that begin, with gradients for x, a and b."""
    return _GatedDelta.apply(x, a, b, weights, sequences)


class _SigmoidAndMultiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, x)
        return dense.sigmoid_and_multiply(gate, x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return dense.sigmoid_and_multiply_backward(grads[0], *ctx.saved_tensors)


def sigmoid_and_multiply(gate: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """sigmoid(gate) * x: gate [..., G], x [..., I], I a multiple of G; each gate multiplies I / G adjacent elements.
    PyTorch computes it on a GPU and for dtypes other than float32 and bfloat16."""
    if not (x.is_cpu and x.dtype in dense.DTYPES and gate.dtype == x.dtype):
        gates = torch.sigmoid(gate).unsqueeze(-1)
        return (x.unflatten(-1, (gate.shape[-1], -1)) * gates).flatten(-2)
    if torch.is_grad_enabled() and (gate.requires_grad or x.requires_grad):
        return _SigmoidAndMultiply.apply(gate, x)
    return dense.sigmoid_and_multiply(gate, x)


def gated_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of x times silu(gate): x, gate [..., V], weight [V] -> [..., V]. With gradients for x and gate."""
    return silu_and_multiply(gate.to(x.dtype), frozen_rms_norm(x, weight, eps))


def offset_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """(1 + weight) * x / rms(x) in float32, rounded once to x's dtype: x [..., H]. With a gradient for x."""
    norm = frozen_rms_norm if torch.is_grad_enabled() and x.requires_grad else rms_norm
    return norm(x.float(), 1.0 + weight.float(), eps).to(x.dtype)
