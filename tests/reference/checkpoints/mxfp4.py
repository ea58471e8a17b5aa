"""MXFP4 as gpt-oss's checkpoints hold it, from the format's description (OCP Microscaling formats, 1.0).

32 adjacent columns share a power of two, stored as its exponent with 127 added. A code is a sign, two bits of exponent,
one of mantissa. A byte holds two codes, the first in its low half.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 32
LEVELS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
VALUES = torch.cat([LEVELS, -LEVELS])
CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def packed(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[..., out, in] -> blocks uint8 [..., out, in / 32, 16], scales uint8 [..., out, in / 32], and what they mean in
    float32 [..., out, in]."""
    groups = weight.float().unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1).clamp(min=2.0**-100)
    exponents = (torch.log2(largest / 6)).ceil()
    scaled = groups / torch.exp2(exponents)[..., None]
    codes = (scaled[..., None] - VALUES).abs().argmin(-1).to(torch.uint8)
    exact = VALUES[codes.long()] * torch.exp2(exponents)[..., None]
    blocks = codes[..., 0::2] | codes[..., 1::2] << 4
    return blocks, (exponents + 127).to(torch.uint8), exact.flatten(-2)


def quantize_experts(directory: Path) -> dict[str, Tensor]:
    """Puts the experts of a gpt-oss checkpoint of one file, as transformers writes it, into MXFP4. Returns what they
    mean, [E, in, out] in float32, by their names."""
    path = directory / "model.safetensors"
    tensors, exact = load_file(path), {}
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        blocks, scales, values = packed(tensors.pop(name).mT)
        tensors |= {f"{name}_blocks": blocks.contiguous(), f"{name}_scales": scales.contiguous()}
        exact[name] = values.mT
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIG}))
    return exact
