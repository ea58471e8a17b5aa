"""SwiGLU of dense MLPs and shared experts on a CPU, with kt-runtime's kernel.

Symbol: `sglang.srt.layers.activation.SiluAndMul.forward_native` (SGLang 0.5.23). Reason: the last bit of PyTorch's silu
depends on the size of the batch and on the number of threads. The training twin calls the same function
(`kt_runtime.ops.activation`).
"""

from __future__ import annotations

from typing import Any

import torch

from kt_runtime.ops.activation import silu_and_multiply
from kt_runtime.sglang_patch.hooks import Hooks

SYMBOLS = ("sglang.srt.layers.activation.SiluAndMul.forward_native",)


def install(hooks: Hooks) -> None:
    if hooks.on_cpu:
        hooks.around(SYMBOLS[0], _forward)


def _forward(original: Any, activation: Any, x: torch.Tensor) -> torch.Tensor:
    """x [..., 2 I], gate and then up -> [..., I]."""
    gate, up = x.chunk(2, dim=-1)
    return silu_and_multiply(gate, up)
