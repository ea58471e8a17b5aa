"""Linear layers of a GGUF model keep their quantized matrices: the blocks of the file, packed like the routed experts.

Symbol (SGLang 0.5.23): after `model_loader.loader.DefaultModelLoader.load_model` the parameters of these layers, which
SGLang has made and `weights.py` has left unwritten, are replaced by `PackedWeight`s. Their memory was never touched.
Reason: a decode step reads every matrix once. Dequantized, attention, shared experts and the head are most of what it
reads.

`serve/models/gguf_model.py` says in the config which layers these are: those of the native step's table and the head,
where all of a layer's tensors have a type that the kernels multiply. SGLang's modules (`linear.py`), the native step
and the training twin multiply by the same packed matrix. On a server with an accelerator they are dequantized.

All layers that ranks split are split by outputs, which are rows: a rank packs its rows of each tensor, and no block is
cut. Training needs columns of all rows, too (`resident/twin/split.py`); the files stay open for that.
"""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kt_runtime.experts.gguf import GgufTensors, gguf_files
from kt_runtime.families import family_for, gguf
from kt_runtime.families.base import TensorSource
from kt_runtime.ranks import Pieces, Share
from kt_runtime.resident import progress
from kt_runtime.sglang_patch.hooks import Hooks
from kt_runtime.sglang_patch.ranks import group
from kt_runtime.sglang_patch.store import keeps_experts_in_store, model_config

SYMBOLS = (
    "sglang.srt.model_loader.loader.DefaultModelLoader.load_model",
    "sglang.srt.runtime_context.get_parallel",
)

HEAD = "lm_head.weight"

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

    if not _is_on or get_parallel().pp_size > 1:
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
    family = family_for(content)
    parts: dict[str, list[TensorSource]] = defaultdict(list)
    for source in family.twin_sources(content):
        if source.name in packed:
            parts[source.source].append(source)
    pieces = {f"{module.name}.weight": module.pieces for module in family.lora_modules(content)}
    exchange = group.exchange()
    size = 0
    with contextlib.ExitStack() as stack:
        tensors = GgufTensors(files)
        if exchange is None:
            stack.enter_context(tensors)
        for parameter, sources in parts.items():
            sources.sort(key=lambda source: source.start)
            held = [gguf.held(content, each.name, each.shape, tensors.names()) for each in sources]
            module = model.get_submodule(parameter.rpartition(".")[0])
            own = None if exchange is None else own_rows(sources, len(module.weight), exchange.share, pieces)
            weight = tensors.packed(held, config.dtype) if own is None else tensors.split(held, config.dtype, own)
            module.weight = torch.nn.Parameter(weight, requires_grad=False)
            size += weight.nbytes
    progress.logger.info("%d linear layers keep the file's quantized matrices: %.2f GB", len(parts), size / 1e9)


def own_rows(
    sources: Sequence[TensorSource], count: int, share: Share, pieces: Mapping[str, tuple[int, ...]]
) -> list[torch.Tensor] | None:
    """The numbers of this rank's rows of each tensor; None: a rank has all.

    `count`: rows of the parameter that SGLang has made for a rank. `pieces`: as of `LoraModule`, by tensor.
    """
    if count >= sum(source.shape[0] for source in sources):
        return None
    if sources[0].name == HEAD:  # padded: the last ranks may have rows behind the vocabulary
        return [torch.arange(share.rank * count, (share.rank + 1) * count)]
    sizes = [pieces.get(source.name) or (source.shape[0],) for source in sources]
    return [Pieces(share, each).own(torch.arange(sum(each))) for each in sizes]
