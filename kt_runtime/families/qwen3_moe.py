"""Qwen3-MoE: grouped-query attention with norms on each head's queries and keys, routed experts in every layer.

Hugging Face: `transformers.models.qwen3_moe`. SGLang: `sglang.srt.models.qwen3_moe`.
"""

from __future__ import annotations

from kt_runtime.errors import InvalidValueError
from kt_runtime.families.base import ATTENTION, Config, Family, FusedLinear, integer, require
from kt_runtime.families.stack import DecoderStack, GroupedQuery, RoutedExperts, StackLayer


class Qwen3Moe(Family):
    name = "qwen3_moe"
    model_types = ("qwen3_moe",)
    architectures = ("Qwen3MoeForCausalLM",)
    gguf_architecture = "qwen3moe"

    def check(self, config: Config) -> None:
        if config.get("mlp_only_layers"):
            raise InvalidValueError(
                f"config.json: 'mlp_only_layers' is {config['mlp_only_layers']!r}; only an empty list can be used: "
                "SGLang 0.5.23 builds routed experts in every Qwen3-MoE layer"
            )
        require(config, "decoder_sparse_step", 1, "SGLang 0.5.23 builds routed experts in every layer", default=1)
        require(config, "tie_word_embeddings", False, "SGLang 0.5.23 never ties Qwen3-MoE's lm_head", default=False)
        require(config, "hidden_act", "silu", "the expert kernels compute SwiGLU", default="silu")

    def attention(self, config: Config) -> list[FusedLinear]:
        hidden, head = integer(config, "hidden_size"), _head_dim(config)
        query = integer(config, "num_attention_heads") * head
        key = integer(config, "num_key_value_heads") * head
        bias = bool(config.get("attention_bias", False))
        parts = (("q_proj", query), ("k_proj", key), ("v_proj", key))
        return [
            FusedLinear("self_attn", "qkv_proj", hidden, parts, ATTENTION, bias),
            FusedLinear("self_attn", "o_proj", query, (("o_proj", hidden),), ATTENTION, bias),
        ]

    def attention_norms(self, config: Config) -> dict[str, int]:
        return {"self_attn.q_norm": _head_dim(config), "self_attn.k_norm": _head_dim(config)}

    def decoder_stack(self, config: Config) -> DecoderStack:
        self.check(config)
        layers = range(integer(config, "num_hidden_layers"))
        return DecoderStack(
            heads=integer(config, "num_attention_heads"),
            top_k=self.num_experts_per_tok(config),
            normalises=bool(config.get("norm_topk_prob", False)),
            groups=None,
            epsilon=float(config.get("rms_norm_eps", 1e-6)),
            interleaved=self.rotates_adjacent(config),
            embedding="model.embed_tokens.weight",
            final_norm="model.norm.weight",
            layers=tuple(_stack_layer(layer, bool(config.get("attention_bias", False))) for layer in layers),
        )

    def moe_layers(self, config: Config) -> list[int]:
        return list(range(integer(config, "num_hidden_layers")))

    def num_experts(self, config: Config) -> int:
        # transformers 5 writes `num_local_experts`, older versions `num_experts`.
        return integer(config, "num_experts", "num_local_experts")


def _head_dim(config: Config) -> int:
    if config.get("head_dim") is not None:
        return integer(config, "head_dim")
    return integer(config, "hidden_size") // integer(config, "num_attention_heads")


def _stack_layer(layer: int, has_bias: bool) -> StackLayer:
    prefix = f"model.layers.{layer}"
    return StackLayer(
        input_norm=f"{prefix}.input_layernorm.weight",
        attention=GroupedQuery(
            qkv=f"{prefix}.self_attn.qkv_proj.weight",
            qkv_bias=f"{prefix}.self_attn.qkv_proj.bias" if has_bias else None,
            query_norm=f"{prefix}.self_attn.q_norm.weight",
            key_norm=f"{prefix}.self_attn.k_norm.weight",
            out=f"{prefix}.self_attn.o_proj.weight",
            out_bias=f"{prefix}.self_attn.o_proj.bias" if has_bias else None,
        ),
        post_norm=f"{prefix}.post_attention_layernorm.weight",
        mlp=None,
        routed=RoutedExperts(f"{prefix}.mlp.gate.weight", None, layer),
    )
