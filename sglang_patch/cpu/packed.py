"""Linear layers of a GGUF model keep their quantized matrices: the blocks of the file, packed like the routed experts.

Symbol (SGLang 0.5.23): after `model_loader.loader.DefaultModelLoader.load_model` the parameters of these layers, which
SGLang has made and `weights.py` has left unwritten, are replaced by `PackedWeight`s. Their memory was never touched.
Reason: a decode step reads every matrix once. Dequantized, attention, shared experts and the head are most of what it
reads.

`serve/models/gguf_model.py` says in the config which layers these are: those of the native step's table and the head,
where all of a layer's tensors have a type that the kernels multiply. SGLang's modules (`linear.py`), the native step
and the training twin multiply by the same packed matrix. Beside an accelerator, and split over ranks, they are
dequantized.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kt_runtime.experts.gguf import GgufTensors, gguf_files
from kt_runtime.families import family_for, gguf
from kt_runtime.families.base import TensorSource
from kt_runtime.resident import progress
from kt_runtime.sglang_patch.hooks import Hooks
from kt_runtime.sglang_patch.store import keeps_experts_in_store, model_config

SYMBOLS = (
    "sglang.srt.model_loader.loader.DefaultModelLoader.load_model",
    "sglang.srt.runtime_context.get_parallel",
)

_is_on = False


def install(hooks: Hooks) -> None:
    global _is_on
    _is_on = hooks.on_cpu
    if hooks.on_cpu:
        hooks.after(SYMBOLS[0], _keep_packed)


def names(config: Mapping[str, Any]) -> Mapping[str, str]:
    """Hugging Face's name of each tensor that stays quantized in this process, and its type. `config`: the content of
    config.json."""
    from sglang.srt.runtime_context import get_parallel

    if not _is_on or get_parallel().tp_size * get_parallel().pp_size > 1:
        return {}
    return gguf.packed_tensors(config)


def _keep_packed(model: Any, *args: Any, **kwargs: Any) -> None:
    config = model_config()
    if not keeps_experts_in_store(config.hf_config):
        return
    content = json.loads((Path(config.model_path) / "config.json").read_text(encoding="utf-8"))
    files = gguf_files(content.get("quantization_config"))
    if not files or not (packed := names(content)):
        return
    parts: dict[str, list[TensorSource]] = defaultdict(list)
    for source in family_for(content).twin_sources(content):
        if source.name in packed:
            parts[source.source].append(source)
    size = 0
    with GgufTensors(files) as tensors:
        for parameter, sources in parts.items():
            sources.sort(key=lambda source: source.start)
            held = [gguf.held(content, each.name, each.shape, tensors.names()) for each in sources]
            weight = tensors.packed(held, config.dtype)
            module = model.get_submodule(parameter.rpartition(".")[0])
            module.weight = torch.nn.Parameter(weight, requires_grad=False)
            size += weight.nbytes
    progress.logger.info("%d linear layers keep the file's quantized matrices: %.2f GB", len(parts), size / 1e9)
