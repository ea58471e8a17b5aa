"""GLM-4.5, 4.6, 4.7 and their Air models: grouped-query attention that rotates a part of each head, DeepSeek's router.
GLM-4.7-Flash: a DeepSeek-V3 of other names.

Hugging Face: `transformers.models.glm4_moe`, `.glm4_moe_lite`. SGLang: `sglang.srt.models.glm4_moe`, `.glm4_moe_lite`.

- Leading layers are dense; the others have shared and routed experts, chosen by sigmoids with a correction bias.
- `use_qk_norm`: norms on each head's queries and keys; the Air models have none.
- SGLang keeps the router's matrix in float32, whatever the model's dtype is; the twin shares it.
- The layer after the last, for multi-token prediction, is in neither model: its tensors are skipped.
- GLM-4.7-Flash: the latents' norms have `rms_norm_eps` in SGLang, and so in the twin; Hugging Face gives them 1e-6.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kt_runtime.errors import InvalidValueError
from kt_runtime.families.base import Config, first_moe_layer, integer, require
from kt_runtime.families.models.deepseek import DeepseekV3
from kt_runtime.families.models.dense_first import DenseFirstFamily
from kt_runtime.families.models.grouped_query import GroupedQueryFamily, require_plain_rotary
from kt_runtime.families.stack import DecoderStack, ExpertGroups
from kt_runtime.families.traits import GROUPED_QUERY, SIGMOID, Traits


class Glm4Moe(DenseFirstFamily, GroupedQueryFamily):
    name = "glm4_moe"
    model_types = ("glm4_moe",)
    architectures = ("Glm4MoeForCausalLM",)
    traits = Traits(GROUPED_QUERY, SIGMOID, shared_experts=True, dense_first_layers=True)
    gguf_architecture = "glm4moe"
    splits_over_ranks = True
    default_epsilon = 1e-5

    def check(self, config: Config) -> None:
        require(config, "hidden_act", "silu", "the expert kernels compute SwiGLU", default="silu")
        require(config, "tie_word_embeddings", False, "published models have a head of their own", default=False)
        require_plain_rotary(config, "the twin's tables were compared with SGLang's for this one only")
        first_moe_layer(config)

    def has_qkv_bias(self, config: Config) -> bool:
        return bool(config.get("attention_bias", False))

    def has_correction_bias(self, config: Config) -> bool:
        return True

    def normalises(self, config: Config) -> bool:
        return bool(config.get("norm_topk_prob", True))

    def groups(self, config: Config) -> ExpertGroups:
        return ExpertGroups(
            groups=config.get("n_group") or 1,
            top_groups=config.get("topk_group") or 1,
            is_sigmoid=True,
            scaling=float(config.get("routed_scaling_factor", 1.0)),
        )

    def attention_norms(self, config: Config) -> dict[str, int]:
        if not config.get("use_qk_norm", False):
            return {}
        return {"self_attn.q_norm": self.head_dim(config), "self_attn.k_norm": self.head_dim(config)}


class Glm4MoeLite(DeepseekV3):
    """transformers writes `mlp_layer_types` where the published config.json has `first_k_dense_replace`."""

    name = "glm4_moe_lite"
    model_types = ("glm4_moe_lite",)
    foreign_model_types = ()
    architectures = ("Glm4MoeLiteForCausalLM",)
    default_epsilon = 1e-5
    routing_defaults: Mapping[str, Any] = {"norm_topk_prob": True, "routed_scaling_factor": 1.8}

    def check(self, config: Config) -> None:
        super().check(self._with_dense_layers(config))

    def missing_keys(self, config: Config) -> dict[str, Any]:
        missing = super().missing_keys(config)
        if config.get("first_k_dense_replace") is None:
            missing["first_k_dense_replace"] = first_moe_layer(self._with_dense_layers(config))
        return missing

    def moe_layers(self, config: Config) -> list[int]:
        return super().moe_layers(self._with_dense_layers(config))

    def decoder_stack(self, config: Config) -> DecoderStack:
        return super().decoder_stack(self._with_dense_layers(config))

    def dense_layers(self, config: Config) -> int:
        """Leading dense layers of a config without `mlp_layer_types`, as in Hugging Face."""
        return 1

    def _with_dense_layers(self, config: Config) -> Config:
        """Raises InvalidValueError if the two keys say different things, or dense layers are not the first ones."""
        layers, types = integer(config, "num_hidden_layers"), config.get("mlp_layer_types")
        if types is None:
            dense = min(self.dense_layers(config), layers)
            types = ["dense"] * dense + ["sparse"] * (layers - dense)
        first = types.count("dense") if isinstance(types, list) else 0
        if types != ["dense"] * first + ["sparse"] * (layers - first):
            raise InvalidValueError(
                f"config.json: 'mlp_layer_types' is {types!r}; expected 'dense' for the first layers and 'sparse' for "
                "all others: SGLang 0.5.23 knows no other order"
            )
        if config.get("first_k_dense_replace") is None:
            return {**config, "first_k_dense_replace": first}
        require(config, "first_k_dense_replace", first, "Hugging Face's first layers are dense by 'mlp_layer_types'")
        return config
