"""Drawn tensors. What a test draws depends on its seed alone, not on what other tests drew before."""

from __future__ import annotations

import torch


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normally distributed in float32, then rounded to `dtype`."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
