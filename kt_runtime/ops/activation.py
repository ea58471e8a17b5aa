"""SwiGLU (Shazeer 2020, arXiv:2002.05202) of dense MLPs and shared experts, forward and backward.

On a CPU kt-runtime's kernel computes silu(gate) * up in float32 and rounds once, for serving and training alike.
PyTorch's silu has two implementations, for whole vectors and for the elements after the last one, which differ in the
last bit. The size of the batch and the number of threads decide which of them computes an element.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from kt_runtime.experts import dense


class _SiluAndMultiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return dense.silu_and_multiply(gate, up)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        return dense.silu_and_multiply_backward(grads[0], gate, up)


def silu_and_multiply(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up: both [..., I]. PyTorch computes it on a GPU and for dtypes other than float32 and bfloat16."""
    if not (gate.is_cpu and gate.dtype in dense.DTYPES and gate.dtype == up.dtype):
        return functional.silu(gate) * up
    if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
        return _SiluAndMultiply.apply(gate, up)
    return dense.silu_and_multiply(gate, up)  # autograd's bookkeeping takes microseconds of a decode step
