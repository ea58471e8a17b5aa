"""LoRA on the projections of latent attention whose queries are not compressed (DeepSeek-V2-Lite).

Symbols (SGLang 0.5.23):

- `lora.lora_manager.LoRAManager.init_lora_shapes`: SGLang reads the target `q_proj` as its fused `qkv_proj`, and
  `kv_a_proj_with_mqa` as its fused `fused_qkv_a_proj_with_mqa`. A model without `q_lora_rank` has neither, but the two
  linears themselves, which SGLang therefore leaves without LoRA. Here its targets get the names of the two.
- `lora.utils.get_default_hidden_dim`: SGLang's table of sizes lacks them.
- `lora.layers.ReplicatedLinearWithLoRA.set_lora_info` and `.apply_lora`: for a linear of one part SGLang leaves out an
  argument that its backend `torch_native` requires. `kv_a_proj_with_mqa` is one.

The rest is SGLang's: its LoRA layers for a column-parallel and for a replicated linear.
"""

from __future__ import annotations

from typing import Any

import torch

from kt_runtime.sglang_patch.hooks import Hooks

SYMBOLS = (
    "sglang.srt.lora.lora_manager.LoRAManager.init_lora_shapes",
    "sglang.srt.lora.utils.get_default_hidden_dim",
    "sglang.srt.lora.layers.ReplicatedLinearWithLoRA.set_lora_info",
    "sglang.srt.lora.layers.ReplicatedLinearWithLoRA.apply_lora",
)
QUERY, LATENT = "q_proj", "kv_a_proj_with_mqa"
OF_FUSED = {"qkv_proj": QUERY, "fused_qkv_a_proj_with_mqa": LATENT}


def install(hooks: Hooks) -> None:
    hooks.after(SYMBOLS[0], name_targets)
    hooks.around(SYMBOLS[1], hidden_dim)
    hooks.after(SYMBOLS[2], keep_offsets_on_host)
    hooks.around(SYMBOLS[3], apply_lora)


def has_whole_queries(config: Any) -> bool:
    """Whether a model with this Hugging Face config has latent attention whose queries are not compressed."""
    has_latents = getattr(config, "kv_lora_rank", None) is not None
    return has_latents and getattr(config, "q_lora_rank", None) is None


def name_targets(_result: None, manager: Any, *args: Any, **kwargs: Any) -> None:
    if has_whole_queries(manager.base_hf_config):
        manager.target_modules = {OF_FUSED.get(name, name) for name in manager.target_modules}


def hidden_dim(original: Any, module_name: str, config: Any, *args: Any, **kwargs: Any) -> tuple[int, int]:
    """(inputs, outputs) of the linear."""
    if has_whole_queries(config) and module_name == QUERY:
        head = config.qk_nope_head_dim + config.qk_rope_head_dim
        return config.hidden_size, config.num_attention_heads * head
    if has_whole_queries(config) and module_name == LATENT:
        return config.hidden_size, config.kv_lora_rank + config.qk_rope_head_dim
    sizes: tuple[int, int] = original(module_name, config, *args, **kwargs)
    return sizes


def keep_offsets_on_host(_result: None, layer: Any, *args: Any, **kwargs: Any) -> None:
    layer._output_offset_cpu = layer._output_offset.cpu()


def apply_lora(original: Any, layer: Any, base_output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`base_output` [T, out] with the LoRA delta of `x` [T, in]."""
    if layer.first_output_dim:
        both: torch.Tensor = original(layer, base_output, x)
        return both
    out: torch.Tensor = layer.lora_backend.run_lora_b_sgemm(
        x=layer.lora_backend.run_lora_a_sgemm(x, layer.A_buffer),
        weights=layer.B_buffer,
        output_offset=layer._output_offset,
        output_offset_cpu=layer._output_offset_cpu,
        base_output=base_output,
    )
    return out
