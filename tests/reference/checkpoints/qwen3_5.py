"""Tiny checkpoints of Qwen3.5-MoE with its vision tower, as transformers writes them: the published names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText
from transformers.models.qwen3_5_moe import Qwen3_5MoeConfig

from kt_runtime.serve.models.make_tokenizer import write_tokenizer
from kt_runtime.serve.models.presets import load_preset

TEXT: dict[str, Any] = load_preset("tiny-qwen3-5-moe-text").config
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "num_position_embeddings": 16,
    "out_hidden_size": TEXT["hidden_size"],
    "patch_size": 4,
}


def build(seed: int = 0) -> Any:
    """transformers' model in float32, with random weights that bfloat16 holds."""
    config = Qwen3_5MoeConfig(text_config=TEXT, vision_config=VISION, tie_word_embeddings=False)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            drawn = (torch.randn(tensor.shape, generator=generator) * 0.08).bfloat16().float()
            tensor.copy_(1 + drawn.bfloat16() if name.endswith("linear_attn.norm.weight") else drawn)
    return model


def save(directory: Path, seed: int = 0) -> Path:
    build(seed).save_pretrained(directory, save_original_format=False)
    write_tokenizer(directory, TEXT)
    return directory
