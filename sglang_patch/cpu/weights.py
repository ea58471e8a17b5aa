"""Gives SGLang's loader all tensors except the routed experts, with quantized matrices dequantized.

Symbols (SGLang 0.5.23): `model_loader.weight_utils.safetensors_weights_iterator` and
`.buffered_multi_thread_safetensors_weights_iterator`. Reason: SGLang's iterators read whole files, for a large MoE
model a terabyte, which must not be read twice. And SGLang warns about every tensor without a parameter.

Layers after the model's last one, for multi-token prediction (MTP), are read past, and so are the vision towers of
models that read images (`families/wrapped.py`). The log says so.

For a GGUF model SGLang finds an empty safetensors file, in whose place these tensors are read from the model's files
(`serve/models/gguf_model.py`).

Quantized matrices are dequantized one by one while loading, but for those of a GGUF model that `packed.py` keeps.
`arguments.py` tells SGLang that the checkpoint is not
quantized, so SGLang creates plain linear layers. The training twin and LoRA share these layers. Plain layers also need
no quantized kernels, which SGLang's wheel does not have for CPUs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kt_runtime.experts.dequantize import plain_tensors
from kt_runtime.experts.gguf import GgufTensors, gguf_files
from kt_runtime.families import family_for, gguf
from kt_runtime.families.base import integer
from kt_runtime.families.quantization import quantization_of
from kt_runtime.families.wrapped import is_left_out
from kt_runtime.resident import progress
from kt_runtime.sglang_patch.cpu import packed
from kt_runtime.sglang_patch.hooks import Hooks
from kt_runtime.sglang_patch.store import keeps_experts_in_store, model_config

SYMBOLS = (
    "sglang.srt.model_loader.weight_utils.safetensors_weights_iterator",
    "sglang.srt.model_loader.weight_utils.buffered_multi_thread_safetensors_weights_iterator",
)
ROUTED_EXPERT = re.compile(r"\.(?:mlp|feed_forward)\.experts\.")
LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def install(hooks: Hooks) -> None:
    for symbol in SYMBOLS:
        hooks.around(symbol, _without_experts)


def dense_tensors(
    files: Iterable[str], dtype: torch.dtype, config: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every tensor but the routed experts, in the order of the files, by the published names.

    `config`: the content of config.json. A quantized matrix is dequantized to `dtype`; every other tensor keeps its
    stored dtype, which SGLang converts.
    """
    family, num_layers = family_for(config), integer(config, "num_hidden_layers")
    quantization = quantization_of(config)
    zero_offset = 1 if quantization is None else quantization.stored_zero_offset
    past: set[str] = set()
    of_images: set[str] = set()

    def is_read(name: str) -> bool:
        ours = family.our_name(name)
        if is_left_out(name):
            of_images.add(name)
            return False
        layer = LAYER.match(ours)
        if name.startswith("mtp.") or (layer is not None and int(layer[1]) >= num_layers):
            past.add(name)
            return False
        return ROUTED_EXPERT.search(ours) is None

    for name, tensor in plain_tensors(files, dtype, is_read, gptq_zero_offset=zero_offset):
        yield family.stored_name(family.our_name(name)), tensor
    if of_images:
        progress.logger.info(
            "read past %d tensors of the vision tower, such as %s: images and videos are not served",
            len(of_images),
            min(of_images),
        )
    _say_what_is_behind(past)


def _say_what_is_behind(past: Collection[str]) -> None:
    if past:
        progress.logger.info(
            "read past %d tensors behind the last layer, such as %s: multi-token prediction (MTP) is not served",
            len(past),
            min(past),
        )


def gguf_tensors(
    files: Sequence[Path], config: Mapping[str, Any], dtype: torch.dtype, kept: Collection[str] = ()
) -> Iterator[tuple[str, torch.Tensor]]:
    """(published name, tensor) of every tensor but the routed experts of a GGUF model, dequantized to `dtype`.

    `kept`: tensors that stay quantized (`packed.py`), by Hugging Face's names: they are left out. Vectors stay float32,
    which SGLang converts where its parameter has another dtype; a tied head is left out. Layers behind the
    last are read past, and the log says so.
    """
    family = family_for(config)
    is_tied = bool(config.get("tie_word_embeddings"))
    with GgufTensors(files) as tensors:
        for source in family.twin_sources(config):
            name = source.name
            if name in kept or (is_tied and name == "lm_head.weight"):
                continue
            held = gguf.held(config, name, source.shape, tensors.names())
            yield family.stored_name(name), tensors.read_held(held, torch.float32 if len(source.shape) == 1 else dtype)
        num_layers = integer(config, "num_hidden_layers")
        _say_what_is_behind([name for name in tensors.names() if gguf.layer_of(name) >= num_layers])


def _without_experts(original: Any, hf_weights_files: list[str], *args: Any, **kwargs: Any) -> Any:
    config = model_config()
    if not keeps_experts_in_store(config.hf_config):
        return original(hf_weights_files, *args, **kwargs)
    progress.logger.info(
        "reading attention, dense and shared weights (%d of the checkpoint's files)", len(hf_weights_files)
    )
    # SGLang's own config has no quantization, because of `arguments.NOT_QUANTIZED`.
    content = json.loads((Path(config.model_path) / "config.json").read_text(encoding="utf-8"))
    if files := gguf_files(content.get("quantization_config")):
        return gguf_tensors(files, content, config.dtype, packed.names(content))
    return dense_tensors(hf_weights_files, config.dtype, content)
