"""gpt-oss-20b and -120b: grouped-query attention with sinks, whose layers alternate between a sliding window and all
keys; routed experts with biases in every layer, chosen by a softmax over logits with a bias.

Hugging Face: `transformers.models.gpt_oss`. SGLang: `sglang.srt.models.gpt_oss`. The published experts are in MXFP4
(`quantization.py`), with the rows of gate and up interleaved. transformers writes them in bfloat16, interleaved and
transposed: gate_up_proj [E, H, 2I] and down_proj [E, I, H].

- The experts compute SwiGLU with a limit and an alpha (`swigluoai` in stack.py), whatever `hidden_act` says. Hugging
  Face takes the alpha from `swiglu_alpha`, SGLang from `hidden_act_alpha`; published configs have neither.
- SGLang counts a window without the query's own key, Hugging Face with it. SGLang keeps sinks in bfloat16, whatever the
  model's dtype is; `sglang_patch/models/gpt_oss.py` gives them the model's.
- Hugging Face's norms multiply by their weight before they round, ours afterwards. Both are equal in float32.
"""

from __future__ import annotations

from typing import Any

from kt_runtime.errors import InvalidValueError
from kt_runtime.families.base import Config, integer, require
from kt_runtime.families.models.grouped_query import GroupedQueryFamily
from kt_runtime.families.stack import SWIGLU_OAI, ExpertMlp
from kt_runtime.families.traits import CLAMP, GROUPED_QUERY, SOFTMAX, WINDOWS, Traits

LIMIT, ALPHA = 7.0, 1.702
FULL, SLIDING = "full_attention", "sliding_attention"  # in `layer_types`
NEEDED = ("head_dim", "num_attention_heads", "num_key_value_heads", "num_local_experts", "sliding_window")


class GptOss(GroupedQueryFamily):
    name = "gpt_oss"
    model_types = ("gpt_oss",)
    architectures = ("GptOssForCausalLM",)
    traits = Traits(
        GROUPED_QUERY, SOFTMAX, shared_experts=False, dense_first_layers=False, parts=frozenset({WINDOWS, CLAMP})
    )
    gguf_architecture = "gpt-oss"
    splits_over_ranks = True
    default_epsilon = 1e-5
    fuses_experts = True
    peft_experts = "fused"
    router_name = "router"

    def check(self, config: Config) -> None:
        for key in NEEDED:
            integer(config, key)
        require(config, "hidden_act", "silu", "Hugging Face's gpt-oss has no other activation", default="silu")
        require(config, "tie_word_embeddings", False, "SGLang 0.5.23 never ties gpt-oss's lm_head", default=False)
        self.layer_types(config)
        self.expert_mlp(config)
        rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
        kind = rotary.get("rope_type") or rotary.get("type") or "default"
        if kind not in ("yarn", "default"):
            raise InvalidValueError(
                f"config.json: the rotary embedding is {kind!r}; only 'yarn' and 'default' can be used: the twin's "
                "tables were compared with SGLang's for these"
            )

    def layer_types(self, config: Config) -> list[str]:
        """The type of each layer, FULL or SLIDING. Raises InvalidValueError for other types, or another number of
        them."""
        layers, found = integer(config, "num_hidden_layers"), config.get("layer_types")
        if found is None:  # as Hugging Face
            return [FULL if layer % 2 else SLIDING for layer in range(layers)]
        if not isinstance(found, list) or len(found) != layers or not set(found) <= {FULL, SLIDING}:
            raise InvalidValueError(
                f"config.json: 'layer_types' is {str(found)[:120]}; expected {FULL!r} or {SLIDING!r} for each of "
                f"num_hidden_layers ({layers}) layers"
            )
        return found

    def window(self, config: Config, layer: int) -> int:
        return integer(config, "sliding_window") if self.layer_types(config)[layer] == SLIDING else 0

    def attention_vectors(self, config: Config) -> dict[str, int]:
        return {"self_attn.sinks": integer(config, "num_attention_heads")}

    def has_qkv_bias(self, config: Config) -> bool:
        return bool(config.get("attention_bias", True))

    def has_out_bias(self, config: Config) -> bool:
        return self.has_qkv_bias(config)

    def has_router_bias(self, config: Config) -> bool:
        return True

    def normalises(self, config: Config) -> bool:
        return True

    def num_experts(self, config: Config) -> int:
        return integer(config, "num_local_experts")

    def expert_intermediate(self, config: Config) -> int:
        return integer(config, "intermediate_size")

    def expert_mlp(self, config: Config) -> ExpertMlp:
        alpha = _positive(config, "swiglu_alpha", ALPHA)
        require(config, "hidden_act_alpha", alpha, "it is SGLang's name of 'swiglu_alpha'", default=alpha)
        limit = _positive(config, "swiglu_limit", LIMIT)
        return ExpertMlp(SWIGLU_OAI, limit, alpha, has_bias=True, is_interleaved=True, is_transposed=True)

    def missing_keys(self, config: Config) -> dict[str, Any]:
        if config.get("swiglu_alpha") is None or config.get("hidden_act_alpha") is not None:
            return {}
        return {"hidden_act_alpha": config["swiglu_alpha"]}


def _positive(config: Config, key: str, default: float) -> float:
    value = config.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
        raise InvalidValueError(f"config.json: {key!r} is {value!r}; expected a number above 0 and below 1e6")
    return float(value)
