"""SGLang's loader does not read the routed experts, which the expert store reads itself.

Symbols (SGLang 0.5.23): `model_loader.weight_utils.safetensors_weights_iterator` and
`.buffered_multi_thread_safetensors_weights_iterator`. Reason: they read whole files; of a large MoE model that is the
terabyte which must not be read twice, and SGLang warns about every tensor that it has no parameter for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from safetensors import safe_open

from kt_runtime.sglang_patch.hooks import Hooks
from kt_runtime.sglang_patch.moe import keeps_experts_in_store, model_config

SYMBOLS = (
    "sglang.srt.model_loader.weight_utils.safetensors_weights_iterator",
    "sglang.srt.model_loader.weight_utils.buffered_multi_thread_safetensors_weights_iterator",
)
ROUTED_EXPERT = re.compile(r"\.mlp\.experts\.")


def install(hooks: Hooks) -> None:
    for symbol in SYMBOLS:
        hooks.around(symbol, _without_experts)


def dense_tensors(files: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of everything but the routed experts, in the order of the files."""
    for file in files:
        with safe_open(file, framework="pt", device="cpu") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                if not ROUTED_EXPERT.search(name):
                    yield name, opened.get_tensor(name)


def _without_experts(original: Any, hf_weights_files: list[str], *args: Any, **kwargs: Any) -> Any:
    if keeps_experts_in_store(model_config().hf_config):
        return dense_tensors(hf_weights_files)
    return original(hf_weights_files, *args, **kwargs)
