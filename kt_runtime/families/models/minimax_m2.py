"""MiniMax-M2, M2.1, M2.5 and M2.7: grouped-query attention with norms over all of a token's queries and keys, which
rotates a part of each head; routed experts in every layer, chosen by sigmoids with a correction bias.

Hugging Face: `transformers.models.minimax_m2`. SGLang: `sglang.srt.models.minimax_m2`. Checkpoints and SGLang have
Mixtral's names; the published weights are in fp8 with blocks of 128 x 128.

- SGLang rotates the first `rotary_dim` elements of a head, Hugging Face the part `partial_rotary_factor`, which it
  takes from `rotary_dim` where a config has it.
- SGLang keeps the router's matrix in float32, whatever the model's dtype is; the twin shares it. The correction bias
  belongs to the MLP, not to its gate.
- The modules of multi-token prediction (`num_mtp_modules`) are in neither model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kt_runtime.errors import InvalidValueError
from kt_runtime.families.base import Config, integer, require
from kt_runtime.families.models.grouped_query import GroupedQueryFamily, require_plain_rotary
from kt_runtime.families.models.mixtral import SHORT_NAMES
from kt_runtime.families.stack import ExpertGroups
from kt_runtime.families.traits import GROUPED_QUERY, SIGMOID, Traits

FULL_ATTENTION = 1  # in `attn_type_list`


class MinimaxM2(GroupedQueryFamily):
    name = "minimax_m2"
    model_types = ("minimax_m2",)
    architectures = ("MiniMaxM2ForCausalLM",)
    traits = Traits(GROUPED_QUERY, SIGMOID, shared_experts=False, dense_first_layers=False)
    gguf_architecture = "minimax-m2"
    splits_over_ranks = True
    renamings = SHORT_NAMES
    written_anyway: Mapping[str, Any] = {
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
    }
    """What Hugging Face's model does, in the keys by which SGLang chooses."""

    def check(self, config: Config) -> None:
        for key, value in self.written_anyway.items():
            require(config, key, value, "Hugging Face's MiniMax-M2 has no other", default=value)
        require(config, "hidden_act", "silu", "the expert kernels compute SwiGLU", default="silu")
        require(config, "tie_word_embeddings", False, "SGLang 0.5.23 never ties MiniMax-M2's lm_head", default=False)
        require(config, "shared_intermediate_size", 0, "SGLang 0.5.23 has no shared experts here", default=0)
        require_plain_rotary(config, "the twin's tables were compared with SGLang's for this one only")
        kinds = config.get("attn_type_list")
        if kinds is not None and set(kinds) != {FULL_ATTENTION}:
            raise InvalidValueError(
                f"config.json: 'attn_type_list' is {kinds!r}; only {FULL_ATTENTION} (full attention) can be used for "
                "each layer: neither SGLang nor Hugging Face has another kind here"
            )
        self.rotary_dim(config)

    def rotary_dim(self, config: Config) -> int:
        """Elements of a head that are rotated. Raises InvalidValueError where two keys say different things."""
        head, rotary = self.head_dim(config), config.get("rotary_dim")
        parameters = config.get("rope_parameters") or {}
        factor = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        by_factor = int(head * (1.0 if factor is None else factor))
        if rotary is None:
            return by_factor
        if factor is not None and rotary != by_factor:
            raise InvalidValueError(
                f"config.json: 'rotary_dim' is {rotary!r}, but 'partial_rotary_factor' {factor!r} of 'head_dim' {head} "
                f"is {by_factor}: SGLang rotates the first, Hugging Face the second"
            )
        return integer(config, "rotary_dim")

    def missing_keys(self, config: Config) -> dict[str, Any]:
        written = {**self.written_anyway, "rotary_dim": self.rotary_dim(config)}
        return {key: value for key, value in written.items() if config.get(key) is None}

    def attention_norms(self, config: Config) -> dict[str, int]:
        query, key = self.widths(config)
        return {"self_attn.q_norm": query, "self_attn.k_norm": key}

    def normalises(self, config: Config) -> bool:
        return True

    def groups(self, config: Config) -> ExpertGroups:
        return ExpertGroups(groups=1, top_groups=1, is_sigmoid=True, scaling=1.0)

    def has_correction_bias(self, config: Config) -> bool:
        return True

    def correction_bias_name(self, layer: int) -> str:
        return f"model.layers.{layer}.mlp.e_score_correction_bias"

    def num_experts(self, config: Config) -> int:
        return integer(config, "num_local_experts", "num_experts")

    def expert_intermediate(self, config: Config) -> int:
        return integer(config, "intermediate_size")
