"""Llama 4 (Scout, Maverick), the language model: layers with chunked attention alternate with layers without rotary
embedding; each token has one routed expert in addition to a shared one.

Hugging Face: `transformers.models.llama4` (`Llama4ForCausalLM`). SGLang: `sglang.srt.models.llama4`. The published
checkpoints also have a vision tower, which is left out (`families/wrapped.py`).

- Three layers of four rotate queries and keys (adjacent pairs), norm each head's without a weight after that
  (`use_qk_norm`: Scout), and attend within chunks of `attention_chunk_size` positions. The fourth rotates nothing,
  sees all keys, and multiplies its queries by a temperature that grows with the position (`attn_temperature_tuning`).
- The router takes the sigmoid of the largest logit. This weight multiplies the expert's input, not its result.
- Experts are fused and transposed in checkpoints: `gate_up_proj` [E, H, 2 I], `down_proj` [E, I, H].
- Dense layers lie between those with experts (`interleave_moe_layer_step`: 2 in Maverick), and have an intermediate
  size of their own, `intermediate_size_mlp`.
- SGLang's `Llama4ForConditionalGeneration` reorders the rows of q_proj and k_proj, so that it may rotate elements half
  a head apart. Its `Llama4ForCausalLM`, which kt-runtime loads, does not; `sglang_patch/models/llama4.py` has it rotate
  adjacent ones. So the weights, and adapters on them, keep the order of the checkpoint.
"""

from __future__ import annotations

from typing import Any

from kt_runtime.errors import InvalidValueError
from kt_runtime.families.base import Config, integer, require
from kt_runtime.families.models.grouped_query import GroupedQueryFamily
from kt_runtime.families.stack import ExpertGroups, ExpertMlp, GroupedQuery, Temperature
from kt_runtime.families.traits import GROUPED_QUERY, SIGMOID, Traits

NO_ROPE_EVERY = 4  # layers; SGLang 0.5.23 knows no other interval
FLOOR_SCALE, ATTENTION_SCALE, CHUNK = 8192, 0.1, 8192  # for a config without these keys, as in Hugging Face


class Llama4(GroupedQueryFamily):
    name = "llama4_text"
    model_types = ("llama4_text",)
    architectures = ("Llama4ForCausalLM",)
    traits = Traits(GROUPED_QUERY, SIGMOID, shared_experts=True, dense_first_layers=False)
    gguf_architecture = "llama4"
    splits_over_ranks = True
    default_epsilon = 1e-5
    mlp_name = "feed_forward"
    shared_name = "shared_expert"
    router_name = "router"
    weighs_input = True
    fuses_experts = True
    peft_experts = "none"

    def check(self, config: Config) -> None:
        require(config, "hidden_act", "silu", "the expert kernels compute SwiGLU", default="silu")
        require(config, "attention_bias", False, "SGLang 0.5.23's Llama 4 has no biases", default=False)
        require(config, "tie_word_embeddings", False, "published models have a head of their own", default=False)
        reason = "a routing weight on the expert's input belongs to one expert"
        require(config, "num_experts_per_tok", 1, reason, default=1)
        self._check_layers(config)
        self._check_rotary(config)
        self.chunk(config)
        self.temperature(config)

    def _check_layers(self, config: Config) -> None:
        layers = integer(config, "num_hidden_layers")
        routed = self.moe_layers(config)
        if not routed:
            raise InvalidValueError(
                f"config.json: 'interleave_moe_layer_step' is {config.get('interleave_moe_layer_step')!r}, but "
                f"'num_hidden_layers' {layers}: no layer has routed experts"
            )
        expected = {
            "moe_layers": (routed, "SGLang 0.5.23 knows 'interleave_moe_layer_step' only"),
            "no_rope_layers": (
                self.rotates(config),
                f"in SGLang 0.5.23 layer {NO_ROPE_EVERY} of {NO_ROPE_EVERY} has no rope",
            ),
            "layer_types": (self._layer_types(config), "layers with a rotary embedding are chunked in SGLang 0.5.23"),
        }
        for key, (value, reason) in expected.items():
            if config.get(key):
                require(config, key, value, reason)
        if not config.get("no_rope_layers"):
            require(
                config, "no_rope_layer_interval", NO_ROPE_EVERY, "SGLang 0.5.23 knows no other", default=NO_ROPE_EVERY
            )

    def _check_rotary(self, config: Config) -> None:
        for key in ("rope_scaling", "rope_parameters"):
            found = config.get(key)
            kind = (found.get("rope_type") or found.get("type") or "default") if isinstance(found, dict) else "default"
            if kind not in ("default", "llama3"):
                raise InvalidValueError(
                    f"config.json: {key!r} is {found!r}; Llama 4's rope types are default and llama3"
                )

    def _layer_types(self, config: Config) -> list[str]:
        return ["chunked_attention" if rotates else "full_attention" for rotates in self.rotates(config)]

    def rotates(self, config: Config) -> list[int]:
        """For each layer 1 if it has a rotary embedding, else 0."""
        return [int((layer + 1) % NO_ROPE_EVERY != 0) for layer in range(integer(config, "num_hidden_layers"))]

    def chunk(self, config: Config) -> int:
        """Positions of a chunk, `attention_chunk_size`."""
        if "attention_chunk_size" in config and config["attention_chunk_size"] is None:
            raise InvalidValueError(
                "config.json: 'attention_chunk_size' is null; Hugging Face 5.19 can't build the mask of such a model"
            )
        return integer({"attention_chunk_size": CHUNK, **config}, "attention_chunk_size")

    def temperature(self, config: Config) -> Temperature | None:
        if not config.get("attn_temperature_tuning", True):
            return None
        every = integer({"floor_scale": FLOOR_SCALE, **config}, "floor_scale")
        strength = config.get("attn_scale", ATTENTION_SCALE)
        if isinstance(strength, bool) or not isinstance(strength, int | float):
            raise InvalidValueError(f"config.json: 'attn_scale' is {strength!r}; expected a number")
        return Temperature(every, float(strength))

    def moe_layers(self, config: Config) -> list[int]:
        step = 1 if config.get("interleave_moe_layer_step") is None else integer(config, "interleave_moe_layer_step")
        return list(range(step - 1, integer(config, "num_hidden_layers"), step))

    def num_experts(self, config: Config) -> int:
        return integer(config, "num_local_experts", "num_experts")

    def num_experts_per_tok(self, config: Config) -> int:
        return 1

    def shared_intermediate(self, config: Config) -> int:
        return integer(config, "intermediate_size")

    def expert_intermediate(self, config: Config) -> int:
        return integer(config, "intermediate_size")

    def dense_intermediate(self, config: Config) -> int:
        return integer(config, "intermediate_size_mlp")

    def expert_mlp(self, config: Config) -> ExpertMlp:
        return ExpertMlp(is_transposed=True)

    def groups(self, config: Config) -> ExpertGroups:
        return ExpertGroups(groups=1, top_groups=1, is_sigmoid=True, scaling=1.0)

    def missing_keys(self, config: Config) -> dict[str, Any]:
        """SGLang's LoRA pool has room for shared experts if it finds this key."""
        key = "shared_expert_intermediate_size"
        return {} if config.get(key) is not None else {key: self.shared_intermediate(config)}

    def rotary_table_numbers(self, config: Config, positions: int | None) -> int:
        """Scout's 10 million positions take gigabytes."""
        most = integer(config, "max_position_embeddings")
        return min(positions or most, most) * self.head_dim(config)

    def rotates_adjacent(self, config: Config) -> bool:
        return True

    def _stack_attention(self, config: Config, layer: int) -> GroupedQuery:
        plain, rotates = super()._stack_attention(config, layer), bool(self.rotates(config)[layer])
        assert isinstance(plain, GroupedQuery)
        return GroupedQuery(
            qkv=plain.qkv,
            qkv_bias=None,
            query_norm=None,
            key_norm=None,
            out=plain.out,
            out_bias=None,
            rotates=rotates,
            unit_norms=rotates and bool(config.get("use_qk_norm", True)),
            is_chunked=rotates,
            temperature=None if rotates else self.temperature(config),
        )
