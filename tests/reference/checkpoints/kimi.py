"""Tiny Kimi-K2.5 checkpoints: as transformers writes them, and with the names of the published one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText
from transformers.models.kimi_k25 import Kimi_K25Config

from kt_runtime.serve.models.make_tokenizer import write_tokenizer
from kt_runtime.serve.models.presets import load_preset

TEXT: dict[str, Any] = {
    **load_preset("tiny-deepseek-v3").config,
    "model_type": "kimi_k2",
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "patch_size": 2,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
}
PUBLISHED = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "auto_map": {"AutoConfig": "configuration_kimi_k25.KimiK25Config"},
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ignore_index": -100,
    "media_placeholder_token_id": 700,
    "model_type": "kimi_k25",
    "pad_token_id": 2,
    "tie_word_embeddings": False,
    "use_unified_vision_chunk": True,
    "video_placeholder": "<|kimi_k25_video_placeholder|>",
    "vision_config": {"model_type": "kimi_k25", "vt_hidden_size": 32, "vt_num_hidden_layers": 1},
}


def build(seed: int = 0) -> Any:
    """transformers' model in float32, with random weights that bfloat16 holds."""
    text = {**TEXT, "model_type": "deepseek_v3"}
    config = Kimi_K25Config(
        text_config=text, vision_config=VISION, projection_hidden_size=32, tie_word_embeddings=False
    )
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if not name.endswith("inv_freq"):
                drawn = (torch.randn(tensor.shape, generator=generator) * 0.08).bfloat16().float()
                tensor.copy_(1 + drawn.bfloat16() if name.endswith("norm.weight") else drawn)
    return model


def save(directory: Path, seed: int = 0) -> Path:
    """As `save_pretrained` of transformers 5 writes it with its own names."""
    build(seed).save_pretrained(directory, save_original_format=False)
    write_tokenizer(directory, TEXT)
    return directory


def published(source: Path, target: Path) -> Path:
    """The text model `source` inside a Kimi-K2.5: names, config.json and vision tower as on the hub."""
    shutil.copytree(source, target)
    inside = json.loads((target / "config.json").read_text()) | {"model_type": "kimi_k2"}
    (target / "config.json").write_text(json.dumps({**PUBLISHED, "text_config": inside}))
    tower = {
        "vision_tower.patch_embed.proj.weight": torch.ones(32, 3, 2, 2).bfloat16(),
        "vision_tower.encoder.blocks.0.wqkv.weight": torch.ones(96, 32).bfloat16(),
        "mm_projector.proj.0.weight": torch.ones(128, 128).bfloat16(),
    }
    weight_map: dict[str, str] = {}
    for path in sorted(target.glob("*.safetensors")):
        tensors = {f"language_model.{name}": tensor for name, tensor in load_file(path).items()}
        tensors |= tower
        tower = {}
        save_file(tensors, path, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, path.name)
    index = target / "model.safetensors.index.json"
    if index.exists():
        index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return target
