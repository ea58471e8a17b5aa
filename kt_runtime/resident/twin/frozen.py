"""The twin's linear layers, norms and MLPs of the base: frozen, with the arithmetic of `kt_runtime.ops`."""

from __future__ import annotations

import torch
from torch import nn

from kt_runtime.ops.activation import silu_and_multiply
from kt_runtime.ops.delta_net import offset_rms_norm
from kt_runtime.ops.matmul import frozen_linear
from kt_runtime.ops.norms import frozen_rms_norm

RMS_NORMS = (
    *("Qwen3MoeRMSNorm", "DeepseekV2RMSNorm", "DeepseekV3RMSNorm"),
    *("MixtralRMSNorm", "OlmoeRMSNorm", "Glm4MoeRMSNorm", "Glm4MoeLiteRMSNorm", "MiniMaxM2RMSNorm"),
    "GptOssRMSNorm",
    "Llama4TextRMSNorm",
    *("DeepseekV32RMSNorm", "GlmMoeDsaRMSNorm"),
)
OFFSET_NORMS = ("Qwen3NextRMSNorm", "Qwen3_5MoeRMSNorm")
GATED_MLPS = (
    *("Qwen3MoeMLP", "DeepseekV2MLP", "DeepseekV3MLP", "Glm4MoeMLP", "Glm4MoeLiteMLP"),
    *("Llama4TextMLP", "Qwen3NextMLP"),
    *("DeepseekV32MLP", "GlmMoeDsaMLP"),
    "Qwen3_5MoeMLP",
)
"""Hugging Face's classes."""


class FrozenLinear(nn.Linear):
    """`torch.nn.Linear` with a gradient for its input only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return frozen_linear(x, self.weight, self.bias)


class FrozenRmsNorm(nn.Module):
    """Replaces the class of a Hugging Face RMSNorm in place; `weight` and `variance_epsilon` stay unchanged."""

    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return frozen_rms_norm(hidden_states, self.weight, self.variance_epsilon)


def is_rms_norm(module: nn.Module) -> bool:
    """Whether `module` is one of the families' RMSNorms, which `kt_runtime.ops.norms` implements."""
    return type(module).__name__ in RMS_NORMS


class FrozenOffsetNorm(nn.Module):
    """Replaces the class of a Hugging Face RMSNorm whose weight is an offset from one; `weight` stays unchanged."""

    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return offset_rms_norm(hidden_states, self.weight, self.variance_epsilon)


def is_offset_norm(module: nn.Module) -> bool:
    return type(module).__name__ in OFFSET_NORMS


class GatedMlp(nn.Module):
    """Replaces the class of a Hugging Face MLP in place; its linear layers stay unchanged."""

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(silu_and_multiply(self.gate_proj(x), self.up_proj(x)))
        return out


def is_gated_mlp(module: nn.Module) -> bool:
    """Whether `module` is one of the families' MLPs, dense or of shared experts. The families require SiLU."""
    return type(module).__name__ in GATED_MLPS
