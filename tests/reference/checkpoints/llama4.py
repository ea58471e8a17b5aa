"""Tiny checkpoints of Llama 4 with its vision tower, as transformers writes them: the published names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, Llama4Config

from kt_runtime.serve.models.make_tokenizer import write_tokenizer
from kt_runtime.serve.models.presets import load_preset

TEXT: dict[str, Any] = load_preset("tiny-llama4").config
VISION = {
    "hidden_size": 32,
    "image_size": 28,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "patch_size": 14,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
    "vision_output_dim": 32,
}


def build(seed: int = 0) -> Any:
    """transformers' model in float32, with random weights that bfloat16 holds."""
    config = Llama4Config(text_config=TEXT, vision_config=VISION, tie_word_embeddings=False)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            drawn = (torch.randn(tensor.shape, generator=generator) * 0.08).bfloat16().float()
            tensor.copy_(1 + drawn.bfloat16() if name.endswith("norm.weight") else drawn)
    return model


def save(directory: Path, seed: int = 0) -> Path:
    build(seed).save_pretrained(directory)
    write_tokenizer(directory, TEXT)
    return directory
