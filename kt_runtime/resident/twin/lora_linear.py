"""LoRA on a dense linear, with the order and rounding of serving on a CPU (SGLang 0.5.23, `lora.torch_ops`).

Serving holds A and B in the model's dtype, rounds scaling * x A^T to this dtype, and adds the product with B to the
base's result before rounding. Masters here are float32; `served_product` defines their gradients. In a float32 model
the result equals PEFT's.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora import Linear as PeftLinear

from kt_runtime.ops.matmul import served_product


class LoraLinear(PeftLinear):
    """PEFT's layer with serving's arithmetic. Input and result have the base's dtype; A [R, in], B [out, R]."""

    def active_lora(self) -> list[tuple[torch.Tensor, torch.Tensor, float]]:
        """(A, B, scaling) of the active adapter; empty if the adapter does not adapt this module."""
        return [
            (self.lora_A.get_parameter(f"{key}.weight"), self.lora_B.get_parameter(f"{key}.weight"), self.scaling[key])
            for key in self._active_here()
        ]

    def drops_out(self) -> bool:
        """Whether the active adapter has dropout and dropout is on."""
        return any(
            isinstance(self.lora_dropout[key], torch.nn.Dropout) and self.training for key in self._active_here()
        )

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = self.base_layer(x, *args, **kwargs)
        for key, (a, b, scaling) in zip(self._active_here(), self.active_lora(), strict=True):
            low = served_product(self.lora_dropout[key](x).flatten(0, -2), a.T, alpha=scaling)
            result = served_product(low, b.T, base=result.flatten(0, -2)).view(result.shape)
        return result

    def _active_here(self) -> list[str]:
        return [key for key in self.active_adapters if key in self.lora_A]
