"""Qwen3.5-MoE and Qwen3.6-MoE as text models: Qwen3-Next's layers, with four input matrices of a Gated DeltaNet layer
in place of two, and rows in the order query, key, value, gate instead of by key head.

Hugging Face: `transformers.models.qwen3_5_moe`. SGLang: `sglang.srt.models.qwen3_5_text`, whose attention layers have
no `self_attn` in their parameters' names. The published models read images too (`families/wrapped.py`): the vision
tower is left out, and so is the layer of multi-token prediction (`mtp.`).

The rotary embedding has a position for each of time, height and width (`mrope_section`). A text's three are equal, so
every section rotates by the same angle, as in the usual embedding.

PEFT 0.21 has no rule for pairs of this family's experts, which transformers fuses: it would drop them.
"""

from __future__ import annotations

from kt_runtime.families.base import Config, require
from kt_runtime.families.models.qwen3_next import Qwen3Next


class Qwen35Moe(Qwen3Next):
    name = "qwen3_5_moe_text"
    model_types = ("qwen3_5_moe_text",)
    architectures = ("Qwen3_5MoeForCausalLM",)
    gguf_architecture = "qwen35moe"
    peft_experts = "fused"
    by_key_head = False
    gate_names = (None, "silu", "swish")
    reason_for_untied = "no published Qwen3.5 or 3.6 with experts ties its lm_head"
    unlisted_lora_targets = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")

    def check(self, config: Config) -> None:
        always = "Hugging Face's router always makes the routing weights sum to 1"
        require(config, "norm_topk_prob", True, always, default=True)
        require(config, "is_causal", True, "answers are generated token by token", default=True)
        super().check(config)

    def input_parts(self, keys: int, values: int) -> tuple[tuple[str, int], ...]:
        return ("in_proj_qkv", 2 * keys + values), ("in_proj_z", values)

    def input_pieces(self, keys: int, values: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return (("in_proj_qkv", (keys, keys, values)),)

    def gate_parts(self, value_heads: int) -> tuple[tuple[str, int], ...]:
        return ("in_proj_b", value_heads), ("in_proj_a", value_heads)
