"""What families with grouped-query attention share: its linears, its norms, and the table of their decoder stack.

transformers has q_proj, k_proj and v_proj; SGLang fuses them into `qkv_proj`. A subclass says where it has norms of
queries and keys, where biases, which layers are dense, and how its router chooses.
"""

from __future__ import annotations

from kt_runtime.errors import InvalidValueError
from kt_runtime.families.base import ATTENTION, Config, Family, FusedLinear, integer
from kt_runtime.families.stack import (
    DecoderStack,
    ExpertGroups,
    GatedDelta,
    GatedMlp,
    GroupedQuery,
    RoutedExperts,
    StackLayer,
)


class GroupedQueryFamily(Family):
    """A family with grouped-query attention. `offset_norms`: as in `DecoderStack`."""

    offset_norms: bool = False

    def shared_gate(self, layer: int) -> str | None:
        """The matrix whose product gates the shared experts' result; None: nothing does."""
        return None

    def has_qkv_bias(self, config: Config) -> bool:
        return False

    def has_out_bias(self, config: Config) -> bool:
        return False

    def normalises(self, config: Config) -> bool:
        """Whether the routing weights of a token sum to 1."""
        return bool(config.get("norm_topk_prob", False))

    def groups(self, config: Config) -> ExpertGroups | None:
        """How the router chooses among groups; None: it is a softmax over all experts."""
        return None

    def chunk(self, config: Config) -> int:
        """Most keys that a query of a chunked layer sees, as in `DecoderStack`; 0: no layer is chunked."""
        return 0

    def head_dim(self, config: Config) -> int:
        if config.get("head_dim") is not None:
            return integer(config, "head_dim")
        return integer(config, "hidden_size") // integer(config, "num_attention_heads")

    def widths(self, config: Config) -> tuple[int, int]:
        """Numbers of a token's queries and of its keys, over all heads."""
        head, heads = self.head_dim(config), integer(config, "num_attention_heads")
        key_heads = heads if config.get("num_key_value_heads") is None else integer(config, "num_key_value_heads")
        return heads * head, key_heads * head

    def heads_to_split(self, config: Config) -> dict[str, int]:
        _, keys = self.widths(config)
        return {**super().heads_to_split(config), "key-value heads": keys // self.head_dim(config)}

    def attention(self, config: Config) -> list[FusedLinear]:
        hidden, (query, key) = integer(config, "hidden_size"), self.widths(config)
        parts = (("q_proj", query), ("k_proj", key), ("v_proj", key))
        return [
            FusedLinear("self_attn", "qkv_proj", hidden, parts, ATTENTION, self.has_qkv_bias(config)),
            FusedLinear("self_attn", "o_proj", query, (("o_proj", hidden),), ATTENTION, self.has_out_bias(config)),
        ]

    def attention_norms(self, config: Config) -> dict[str, int]:
        return {}

    def moe_layers(self, config: Config) -> list[int]:
        return list(range(integer(config, "num_hidden_layers")))

    def decoder_stack(self, config: Config) -> DecoderStack:
        self.check(config)
        return DecoderStack(
            heads=integer(config, "num_attention_heads"),
            top_k=self.num_experts_per_tok(config),
            normalises=self.normalises(config),
            groups=self.groups(config),
            epsilon=float(config.get("rms_norm_eps", self.default_epsilon)),
            interleaved=self.rotates_adjacent(config),
            embedding="model.embed_tokens.weight",
            final_norm="model.norm.weight",
            layers=tuple(self._stack_layer(config, layer) for layer in range(integer(config, "num_hidden_layers"))),
            weighs_input=self.weighs_input,
            chunk=self.chunk(config),
            offset_norms=self.offset_norms,
        )

    def _stack_layer(self, config: Config, layer: int) -> StackLayer:
        prefix, is_routed = f"model.layers.{layer}", layer in set(self.moe_layers(config))
        mlp = None
        if not is_routed or self.shared_intermediate(config):
            parent = f"{prefix}.{self.mlp_name}" + (f".{self.shared_name}" if is_routed else "")
            gate = self.shared_gate(layer) if is_routed else None
            mlp = GatedMlp(f"{parent}.gate_up_proj.weight", f"{parent}.down_proj.weight", gate)
        bias = self.engine_name(self.correction_bias_name(layer)) if self.has_correction_bias(config) else None
        return StackLayer(
            input_norm=f"{prefix}.input_layernorm.weight",
            attention=self._stack_attention(config, layer),
            post_norm=f"{prefix}.post_attention_layernorm.weight",
            mlp=mlp,
            routed=self._stack_experts(config, layer, bias) if is_routed else None,
        )

    def _stack_experts(self, config: Config, layer: int, bias: str | None) -> RoutedExperts:
        router = self.router_module(layer)
        gate_bias = self.engine_name(f"{router}.bias") if self.has_router_bias(config) else None
        return RoutedExperts(self.engine_name(f"{router}.weight"), bias, layer, gate_bias)

    def _stack_attention(self, config: Config, layer: int) -> GroupedQuery | GatedDelta:
        prefix, has_norms = f"model.layers.{layer}.self_attn", bool(self.attention_norms(config))
        return GroupedQuery(
            qkv=f"{prefix}.qkv_proj.weight",
            qkv_bias=f"{prefix}.qkv_proj.bias" if self.has_qkv_bias(config) else None,
            query_norm=f"{prefix}.q_norm.weight" if has_norms else None,
            key_norm=f"{prefix}.k_norm.weight" if has_norms else None,
            out=f"{prefix}.o_proj.weight",
            out_bias=f"{prefix}.o_proj.bias" if self.has_out_bias(config) else None,
            sinks=f"{prefix}.sinks" if "self_attn.sinks" in self.attention_vectors(config) else None,
            window=self.window(config, layer),
        )


def require_plain_rotary(config: Config, reason: str) -> None:
    """Raises InvalidValueError for a config with a scaled rotary embedding, under either of its keys."""
    for key in ("rope_scaling", "rope_parameters"):
        found = config.get(key)
        kind = (found.get("rope_type") or found.get("type") or "default") if isinstance(found, dict) else None
        if found and kind != "default":
            raise InvalidValueError(f"config.json: {key!r} is {found!r}; only the default can be used: {reason}")
