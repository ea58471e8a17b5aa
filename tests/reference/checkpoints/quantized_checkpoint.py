"""A bf16 checkpoint of ours quantized, and beside it the same model in float32 with the weights that it then means."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from reference.quantized import SCHEMES
from safetensors.torch import load_file, save_file
from torch import Tensor

LINEAR = re.compile(r"_proj(_with_mqa)?\.weight$")  # not the embedding, the router or the head, as on the hub
ROUTED_EXPERT = re.compile(r"\.mlp\.experts\.\d+\.")
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def quantize_checkpoint(source: Path, place: Path, scheme: str, *, experts_only: bool = False) -> tuple[Path, Path]:
    """Writes `place/quantized` and `place/dequantized` from the one-file checkpoint `source`; returns both.

    In the quantized one, codes and plain tensors are in the first shard and scales in the second, so that no matrix is
    in one file. `experts_only`: the rest stays bf16, as Kimi-K2-Thinking has it.
    """
    stored: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
    exact: dict[str, Tensor] = {}
    for name, weight in load_file(source / "model.safetensors").items():
        if not LINEAR.search(name) or (experts_only and not ROUTED_EXPERT.search(name)):
            stored[0][name], exact[name] = weight, weight.float()
            continue
        tensors, values = SCHEMES[scheme].store(weight)
        for number, (part, tensor) in enumerate(tensors.items()):
            stored[number > 0][name.removesuffix(".weight") + part] = tensor
        exact[name] = values.float()
    config = json.loads((source / "config.json").read_text())
    quantized, plain = place / "quantized", place / "dequantized"
    _write(
        source,
        quantized,
        {**config, "quantization_config": SCHEMES[scheme].config},
        dict(zip(SHARDS, stored, strict=True)),
    )
    _write(source, plain, config, {"model.safetensors": exact})
    return quantized, plain


def _write(source: Path, target: Path, config: dict[str, Any], shards: dict[str, dict[str, Tensor]]) -> None:
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
    (target / "config.json").write_text(json.dumps(config))
    for shard, tensors in shards.items():
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / shard, {"format": "pt"})
    if len(shards) > 1:
        weight_map = {name: shard for shard, tensors in shards.items() for name in tensors}
        (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
