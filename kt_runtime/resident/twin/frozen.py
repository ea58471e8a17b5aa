"""The base's linear layers and norms as the twin has them: never trained, with the gradients of `kt_runtime.ops`."""

from __future__ import annotations

import torch
from torch import nn

from kt_runtime.ops.matmul import frozen_linear
from kt_runtime.ops.norms import frozen_rms_norm


class FrozenLinear(nn.Linear):
    """As `torch.nn.Linear`, with a gradient for its input alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return frozen_linear(x, self.weight, self.bias)


class FrozenRmsNorm(nn.Module):
    """Takes the class of a Hugging Face module in place: `weight` and `variance_epsilon` stay as they are."""

    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return frozen_rms_norm(hidden_states, self.weight, self.variance_epsilon)


def is_rms_norm(module: nn.Module) -> bool:
    """Whether it is one of the families' RMSNorms, whose arithmetic `kt_runtime.ops.norms` has."""
    return type(module).__name__ in ("Qwen3MoeRMSNorm", "DeepseekV2RMSNorm", "DeepseekV3RMSNorm")
