"""Checkpoints that transformers itself writes: its names, its config.json, its shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kt_runtime.serve.models.make_tokenizer import write_tokenizer
from kt_runtime.serve.models.presets import Preset

GRID = 2.0**-10


def build(preset: Preset, seed: int = 0, *, on_grid: bool = True) -> Any:
    """The preset's model in float32, with random weights. `on_grid`: of 8 bits, which bfloat16 and float16 hold too."""
    config = AutoConfig.for_model(**preset.config)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("inv_freq"):
                continue
            drawn = torch.randn(tensor.shape, generator=generator) * 0.08
            if on_grid:
                drawn = (drawn / GRID).round().clamp(-255, 255) * GRID
            tensor.copy_(1 + drawn.clamp(-0.2, 0.2).mul(32).round().div(32) if name.endswith("norm.weight") else drawn)
    return model


def save(
    preset: Preset,
    directory: Path,
    dtype: torch.dtype = torch.float32,
    *,
    fused: bool = False,
    shard_bytes: int | None = None,
    seed: int = 0,
    on_grid: bool = True,
) -> Path:
    """`fused`: a layer's experts in two tensors, as transformers 5 holds them; else as the hub has them."""
    model = build(preset, seed, on_grid=on_grid).to(dtype)
    shards = {} if shard_bytes is None else {"max_shard_size": shard_bytes}
    model.save_pretrained(directory, save_original_format=not fused, **shards)
    write_tokenizer(directory, preset.config)
    return directory
