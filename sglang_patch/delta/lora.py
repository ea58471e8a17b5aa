"""LoRA on the linears of Gated DeltaNet layers, and buffers of the layers' own sizes.

Symbols (SGLang 0.5.23):

- `lora.lora_manager.LoRAManager.__init__`: adds the targets that SGLang's option does not offer
  (`Family.unlisted_lora_targets`).
- `models.qwen3_next.Qwen3NextForCausalLM.get_hidden_dim` and `.get_stacked_multiply`, which SGLang's LoRA calls where a
  model has them. Reason: without them it takes the sizes of a dense Llama, which the gated `q_proj` and the shared
  expert do not have.
- `lora.layers.get_lora_layer`: `in_proj_qkvz` is one matrix in transformers and PEFT, with one A and one B; SGLang's
  class for merged linears has four.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from kt_runtime.errors import UnknownNameError
from kt_runtime.families import LoraModule, family_for
from kt_runtime.sglang_patch.delta.layers import ONE_MATRIX
from kt_runtime.sglang_patch.hooks import Hooks
from kt_runtime.sglang_patch.lora.adapter import pool_key

MODEL = "sglang.srt.models.qwen3_next.Qwen3NextForCausalLM"
SYMBOLS = (
    "sglang.srt.lora.lora_manager.LoRAManager.__init__",
    f"{MODEL}.get_hidden_dim",
    f"{MODEL}.get_stacked_multiply",
    "sglang.srt.lora.layers.get_lora_layer",
    "sglang.srt.lora.layers.BaseLayerWithLoRA",
    "sglang.srt.lora.layers.ColumnParallelLinearWithLoRA",
)
NOTHING = (1, 1)  # the size of a buffer for a linear that a layer does not have


def install(hooks: Hooks) -> None:
    if hooks.on_cpu:
        hooks.before(SYMBOLS[0], add_targets)
        hooks.add(SYMBOLS[1], hidden_dim)
        hooks.add(SYMBOLS[2], stacked_multiply)
        hooks.around(SYMBOLS[3], lora_layer)


def add_targets(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """SGLang passes everything by name."""
    targets = kwargs.get("target_modules")
    try:
        family = family_for(kwargs["base_hf_config"].to_dict())
    except UnknownNameError:
        return None
    if not targets or not family.unlisted_lora_targets:
        return None
    return args, kwargs | {"target_modules": {*targets, *family.unlisted_lora_targets}}


def hidden_dim(model: Any, module_name: str, layer_idx: int) -> tuple[int, int]:
    """(in, out) of the fused linear with the pool's name `module_name`."""
    members = _members(model).get((module_name, layer_idx))
    return NOTHING if members is None else (members[0].in_features, max(module.stop for module in members))


def stacked_multiply(model: Any, module_name: str) -> int:
    """The number of linears of which SGLang's consists, each with an A of its own."""
    return max((len(found) for (name, _), found in _members(model).items() if name == module_name), default=1)


def _members(model: Any) -> dict[tuple[str, int], list[LoraModule]]:
    found: dict[tuple[str, int], list[LoraModule]] | None = getattr(model, "kt_lora_members", None)
    if found is None:
        found = model.kt_lora_members = {}
        config = model.config.to_dict()
        for module in family_for(config).lora_modules(config):
            found.setdefault(pool_key(module), []).append(module)
    return found


def lora_layer(original: Callable[..., Any], layer: Any, lora_backend: Any, **kwargs: Any) -> Any:
    if getattr(layer, ONE_MATRIX, False):
        return _layer_class()(layer, lora_backend)
    return original(layer, lora_backend, **kwargs)


@cache
def _layer_class() -> type:
    from sglang.srt.lora.layers import BaseLayerWithLoRA, ColumnParallelLinearWithLoRA

    class WholeLinearWithLoRA(ColumnParallelLinearWithLoRA):
        """A merged linear with one A and one B for all of its rows."""

        def __init__(self, base_layer: Any, lora_backend: Any) -> None:
            BaseLayerWithLoRA.__init__(self, base_layer, lora_backend)
            offsets = torch.tensor([0, sum(base_layer.output_partition_sizes)], dtype=torch.int32)
            self.output_offset = self.output_offset_cpu = offsets

    return WholeLinearWithLoRA
