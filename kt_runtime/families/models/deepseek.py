"""DeepSeek-V2, DeepSeek-V3 and Kimi-K2: latent attention (MLA), leading dense layers, shared and routed experts.

Hugging Face: `transformers.models.deepseek_v2`, `.deepseek_v3`. SGLang: `sglang.srt.models.deepseek_v2`, all of them.

- With `q_lora_rank`, SGLang fuses q_a_proj and kv_a_proj_with_mqa into `fused_qkv_a_proj_with_mqa`. Without it
  (DeepSeek-V2-Lite), SGLang has q_proj and kv_a_proj_with_mqa as they are; `sglang_patch/lora/whole_queries.py` tells
  SGLang's LoRA code, which knows the fused ones only.
- After loading, SGLang keeps `kv_b_proj.weight` unchanged and derives copies from it, w_kc and w_vc, for the absorbed
  form. The twin shares `kv_b_proj.weight`.
- SGLang may fuse the shared experts into the routed ones; the server must be started with
  `--disable-shared-experts-fusion`, or `mlp.shared_experts` does not exist in SGLang.
- `e_score_correction_bias` is a float32 parameter in SGLang, a buffer in Hugging Face.
- Layers of multi-token prediction (`num_nextn_predict_layers`) are in neither model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kt_runtime.errors import InvalidValueError
from kt_runtime.families.base import ATTENTION, Config, FusedLinear, first_moe_layer, integer, require
from kt_runtime.families.models.dense_first import DenseFirstFamily
from kt_runtime.families.stack import DecoderStack, ExpertGroups, GatedMlp, Latent, RoutedExperts, StackLayer
from kt_runtime.families.traits import LATENT, SIGMOID, SOFTMAX, Traits


class DeepseekV2(DenseFirstFamily):
    name = "deepseek_v2"
    model_types: tuple[str, ...] = ("deepseek_v2",)
    architectures = ("DeepseekV2ForCausalLM",)
    traits = Traits(LATENT, SOFTMAX, shared_experts=True, dense_first_layers=True)
    gguf_architecture = "deepseek2"
    splits_over_ranks = True
    routing_defaults: Mapping[str, Any] = {"norm_topk_prob": False, "routed_scaling_factor": 1.0}
    """Values for a config without these keys, as in Hugging Face."""
    written_anyway: Mapping[str, Any] = {
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "n_group": 1,
        "topk_group": 1,  # null is one group
    }
    """What Hugging Face's router does, in the keys by which SGLang chooses its router."""

    def check(self, config: Config) -> None:
        require(config, "moe_layer_freq", 1, "Hugging Face has experts in every layer after the dense ones", default=1)
        require(config, "attention_bias", False, "SGLang 0.5.23's latent attention has no biases", default=False)
        require(config, "mlp_bias", False, "SGLang 0.5.23's DeepSeek MLP has no biases", default=False)
        require(config, "hidden_act", "silu", "the expert kernels compute SwiGLU", default="silu")
        if not self.chooses_keys:
            require(config, "index_topk", None, "the queries of this family see all keys; it has no indexer")
        first_moe_layer(config)
        self.check_routing(config)

    def check_routing(self, config: Config) -> None:
        if config.get("topk_method", "greedy") not in ("greedy", "group_limited_greedy"):
            raise InvalidValueError(
                f"config.json: 'topk_method' is {config['topk_method']!r}; DeepSeek-V2's are 'greedy' and "
                "'group_limited_greedy'"
            )
        if config.get("topk_method", "greedy") == "greedy" and config.get("n_group") is not None:
            require(config, "n_group", 1, "with 'greedy', SGLang would choose among groups, Hugging Face not")
        require(config, "norm_topk_prob", False, "Hugging Face's DeepSeek-V2 never normalises", default=False)
        require(config, "scoring_func", "softmax", "the twin's router is DeepSeek-V2's", default="softmax")

    def missing_keys(self, config: Config) -> dict[str, Any]:
        written = {**self.written_anyway, "moe_layer_freq": 1}
        return {key: value for key, value in written.items() if config.get(key) is None}

    def attention(self, config: Config) -> list[FusedLinear]:
        hidden, heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
        latent, rope = integer(config, "kv_lora_rank"), integer(config, "qk_rope_head_dim")
        nope, value = integer(config, "qk_nope_head_dim"), integer(config, "v_head_dim")
        query = heads * (nope + rope)
        kv_a = ("kv_a_proj_with_mqa", latent + rope)
        if config.get("q_lora_rank") is None:
            front = [
                _attention("q_proj", hidden, ("q_proj", query)),
                _attention("kv_a_proj_with_mqa", hidden, kv_a, is_whole=True),
            ]
        else:
            rank = integer(config, "q_lora_rank")
            front = [
                _attention("fused_qkv_a_proj_with_mqa", hidden, ("q_a_proj", rank), kv_a, is_whole=True),
                _attention("q_b_proj", rank, ("q_b_proj", query)),
            ]
        return [
            *front,
            _attention("kv_b_proj", latent, ("kv_b_proj", heads * (nope + value))),
            _attention("o_proj", heads * value, ("o_proj", hidden)),
        ]

    def attention_norms(self, config: Config) -> dict[str, int]:
        norms = {"self_attn.kv_a_layernorm": integer(config, "kv_lora_rank")}
        if config.get("q_lora_rank") is not None:
            norms["self_attn.q_a_layernorm"] = integer(config, "q_lora_rank")
        return norms

    def decoder_stack(self, config: Config) -> DecoderStack:
        self.check(config)
        routing = {**self.routing_defaults, **config}
        return DecoderStack(
            heads=integer(config, "num_attention_heads"),
            top_k=self.num_experts_per_tok(config),
            normalises=bool(routing["norm_topk_prob"]),
            groups=ExpertGroups(
                groups=config.get("n_group") or 1,
                top_groups=config.get("topk_group") or 1,
                is_sigmoid=self.has_correction_bias(config),
                scaling=float(routing["routed_scaling_factor"]),
            ),
            epsilon=float(config.get("rms_norm_eps", self.default_epsilon)),
            interleaved=self.rotates_adjacent(config),
            embedding="model.embed_tokens.weight",
            final_norm="model.norm.weight",
            layers=tuple(self._stack_layer(config, layer) for layer in range(integer(config, "num_hidden_layers"))),
        )

    def rotates_adjacent(self, config: Config) -> bool:
        return bool(config.get("rope_interleave", True))

    def _stack_layer(self, config: Config, layer: int) -> StackLayer:
        prefix, is_routed = f"model.layers.{layer}", layer >= first_moe_layer(config)
        mlp = f"{prefix}.mlp.shared_experts" if is_routed else f"{prefix}.mlp"
        bias = f"{prefix}.mlp.gate.e_score_correction_bias" if self.has_correction_bias(config) else None
        return StackLayer(
            input_norm=f"{prefix}.input_layernorm.weight",
            attention=_latent(f"{prefix}.self_attn", config.get("q_lora_rank") is not None),
            post_norm=f"{prefix}.post_attention_layernorm.weight",
            mlp=GatedMlp(f"{mlp}.gate_up_proj.weight", f"{mlp}.down_proj.weight"),
            routed=RoutedExperts(f"{prefix}.mlp.gate.weight", bias, layer) if is_routed else None,
        )


class DeepseekV3(DeepseekV2):
    name = "deepseek_v3"
    model_types: tuple[str, ...] = ("deepseek_v3", "kimi_k2")
    foreign_model_types: tuple[str, ...] = ("kimi_k2",)
    architectures = ("DeepseekV3ForCausalLM",)
    traits = Traits(LATENT, SIGMOID, shared_experts=True, dense_first_layers=True)
    routing_defaults: Mapping[str, Any] = {"norm_topk_prob": True, "routed_scaling_factor": 2.5}
    written_anyway: Mapping[str, Any] = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}

    def check_routing(self, config: Config) -> None:
        # SGLang routes by sigmoid with a bias only if this key says so; Hugging Face's DeepSeek-V3 always does, and
        # does not write the key (`missing_keys`).
        reason = "the twin's router is DeepSeek-V3's, with a correction bias"
        require(config, "topk_method", "noaux_tc", reason, default="noaux_tc")
        require(config, "scoring_func", "sigmoid", "the twin's router is DeepSeek-V3's", default="sigmoid")

    def has_correction_bias(self, config: Config) -> bool:
        return True


def _attention(source: str, in_features: int, *parts: tuple[str, int], is_whole: bool = False) -> FusedLinear:
    return FusedLinear("self_attn", source, in_features, parts, ATTENTION, is_whole=is_whole)


def _latent(prefix: str, compresses_queries: bool) -> Latent:
    return Latent(
        compress=f"{prefix}.{'fused_qkv_a_proj_with_mqa' if compresses_queries else 'kv_a_proj_with_mqa'}.weight",
        query_norm=f"{prefix}.q_a_layernorm.weight" if compresses_queries else None,
        query=f"{prefix}.{'q_b_proj' if compresses_queries else 'q_proj'}.weight",
        latent_norm=f"{prefix}.kv_a_layernorm.weight",
        key_heads=f"{prefix}.w_kc",
        value_heads=f"{prefix}.w_vc",
        out=f"{prefix}.o_proj.weight",
    )
