"""LoRA on the linears of Gated DeltaNet layers, and buffers of the layers' own sizes.

Symbols (SGLang 0.5.23):

- `lora.lora_manager.LoRAManager.__init__`: adds the targets that SGLang's option does not offer
  (`Family.unlisted_lora_targets`).
- `models.qwen3_next.Qwen3NextForCausalLM.get_hidden_dim` and `.get_stacked_multiply`, and those of
  `models.qwen3_5_text.Qwen3_5MoeForCausalLM`, which SGLang's LoRA calls where a model has them. Reason: without them it
  takes the sizes of a dense Llama, which the gated `q_proj` and the shared expert do not have.
- `lora.mem_pool.LoRAMemoryPool._dense_local_dim`: counts as many of SGLang's own parts of a merged linear as
  transformers has, which for `in_proj_ba` is half of its rows.
- `lora.layers.get_lora_layer`: `in_proj_qkvz` and `in_proj_ba` have an A and a B for each of transformers' linears: one
  in Qwen3-Next, two in Qwen3.5. SGLang's class for merged linears has four, and two.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import accumulate
from typing import Any

import torch

from kt_runtime.errors import UnknownNameError
from kt_runtime.families import LoraModule, family_for
from kt_runtime.sglang_patch.delta.layers import PARTS
from kt_runtime.sglang_patch.hooks import Hooks
from kt_runtime.sglang_patch.lora.adapter import pool_key
from kt_runtime.sglang_patch.ranks import group

MODEL = "sglang.srt.models.qwen3_next.Qwen3NextForCausalLM"
QWEN35 = "sglang.srt.models.qwen3_5_text.Qwen3_5MoeForCausalLM"
SYMBOLS = (
    "sglang.srt.lora.lora_manager.LoRAManager.__init__",
    f"{MODEL}.get_hidden_dim",
    f"{MODEL}.get_stacked_multiply",
    "sglang.srt.lora.layers.get_lora_layer",
    f"{QWEN35}.get_hidden_dim",
    f"{QWEN35}.get_stacked_multiply",
    "sglang.srt.lora.mem_pool.LoRAMemoryPool._dense_local_dim",
    "sglang.srt.lora.layers.BaseLayerWithLoRA",
    "sglang.srt.lora.layers.ColumnParallelLinearWithLoRA",
)


def install(hooks: Hooks) -> None:
    if hooks.on_cpu:
        hooks.before(SYMBOLS[0], add_targets)
        hooks.add(SYMBOLS[1], hidden_dim)
        hooks.add(SYMBOLS[2], stacked_multiply)
        hooks.around(SYMBOLS[3], lora_layer)
        hooks.add(SYMBOLS[4], hidden_dim)
        hooks.add(SYMBOLS[5], stacked_multiply)
        hooks.around(SYMBOLS[6], local_dim)


def add_targets(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """SGLang passes everything by name."""
    targets = kwargs.get("target_modules")
    try:
        config = kwargs["base_hf_config"].to_dict()
        family = family_for(config)
    except UnknownNameError:
        return None
    if not targets or not family.unlisted_lora_targets:
        return None
    modules = family.lora_modules(config)
    added = {pool_key(module)[0] for module in modules if module.projection in family.unlisted_lora_targets}
    return args, kwargs | {"target_modules": {*targets, *added}}


def hidden_dim(model: Any, module_name: str, layer_idx: int) -> tuple[int, int]:
    """(in, out) of the fused linear with the pool's name `module_name`. SGLang divides them by the number of ranks: so
    they are those of the smallest buffer where the layer does not have the linear."""
    members = _members(model).get((module_name, layer_idx))
    if members is None:
        return group.num_ranks(), group.num_ranks()
    return members[0].in_features, max(module.stop for module in members)


def stacked_multiply(model: Any, module_name: str) -> int:
    """The number of linears of which SGLang's consists, each with an A of its own."""
    return max((len(found) for (name, _), found in _members(model).items() if name == module_name), default=1)


def local_dim(
    original: Callable[..., int | None], pool: Any, module_name: str, base_model: Any, *args: Any
) -> int | None:
    """None: SGLang takes the sizes of `hidden_dim`."""
    if getattr(type(base_model), "get_hidden_dim", None) is hidden_dim:
        return None
    return original(pool, module_name, base_model, *args)


def _members(model: Any) -> dict[tuple[str, int], list[LoraModule]]:
    found: dict[tuple[str, int], list[LoraModule]] | None = getattr(model, "kt_lora_members", None)
    if found is None:
        found = model.kt_lora_members = {}
        config = model.config.to_dict()
        for module in family_for(config).lora_modules(config):
            found.setdefault(pool_key(module), []).append(module)
    return found


def lora_layer(original: Callable[..., Any], layer: Any, lora_backend: Any, **kwargs: Any) -> Any:
    if hasattr(layer, PARTS):
        return _layer_class()(layer, lora_backend)
    return original(layer, lora_backend, **kwargs)


@cache
def _layer_class() -> type:
    from sglang.srt.lora.layers import BaseLayerWithLoRA, ColumnParallelLinearWithLoRA

    class LinearOfPartsWithLoRA(ColumnParallelLinearWithLoRA):
        """A merged linear with one A and one B for each of its parts."""

        def __init__(self, base_layer: Any, lora_backend: Any) -> None:
            BaseLayerWithLoRA.__init__(self, base_layer, lora_backend)
            offsets = list(accumulate(getattr(base_layer, PARTS), initial=0))
            self.output_offset = self.output_offset_cpu = torch.tensor(offsets, dtype=torch.int32)

        def apply_lora(self, base_output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            """base_output [T, N], which changes, and x [T, K] -> [T, N]."""
            parts = len(self.output_offset_cpu) - 1
            low = self.lora_backend.run_lora_a_sgemm(x, self.A_buffer, stack_num=parts)
            out: torch.Tensor = self.lora_backend.run_lora_b_sgemm(
                x=low,
                weights=self.B_buffer,
                output_offset=self.output_offset,
                output_offset_cpu=self.output_offset_cpu,
                base_output=base_output,
            )
            return out

    return LinearOfPartsWithLoRA
