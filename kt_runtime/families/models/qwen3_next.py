"""Qwen3-Next and Qwen3-Coder-Next: three of four layers are Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464), the
fourth has grouped-query attention whose output has a gate; routed experts and a gated shared one in every layer.

Hugging Face: `transformers.models.qwen3_next`. SGLang: `sglang.srt.models.qwen3_next`, whose attention layers have no
`self_attn` in their parameters' names.

- `q_proj` has two parts for each head: the query, and the gate of the head's output.
- The norms' weights are offsets from one, but for the one after the delta rule.
- `in_proj_qkvz` and `in_proj_ba` are ordered by key head: of each its query, its key, its values, their gates.
- `in_proj_ba`: write strengths and decays.
- The layer of multi-token prediction (`mtp.`) is in neither model.
"""

from __future__ import annotations

from typing import Any

from kt_runtime.errors import InvalidValueError
from kt_runtime.families.base import ATTENTION, Config, FusedLinear, integer, require
from kt_runtime.families.models.grouped_query import GroupedQueryFamily, require_plain_rotary
from kt_runtime.families.stack import GatedDelta, GroupedQuery
from kt_runtime.families.traits import GROUPED_QUERY, LINEAR_ATTENTION, SOFTMAX, Traits

LINEAR, FULL = "linear_attention", "full_attention"
MOST_TAPS = 8
"""Largest number of taps of the short convolution in csrc/ops/delta."""
SIZES = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("linear_conv_kernel_dim", "linear_num_key_heads", "linear_num_value_heads"),
    *("linear_key_head_dim", "linear_value_head_dim"),
    *("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"),
)
"""Keys for which Hugging Face and SGLang have defaults, not always the same ones: a config has all of them."""


class Qwen3Next(GroupedQueryFamily):
    name = "qwen3_next"
    model_types = ("qwen3_next",)
    architectures = ("Qwen3NextForCausalLM",)
    traits = Traits(
        GROUPED_QUERY, SOFTMAX, shared_experts=True, dense_first_layers=False, parts=frozenset({LINEAR_ATTENTION})
    )
    gguf_architecture = "qwen3next"
    splits_over_ranks = True
    shared_name = "shared_expert"
    keeps_states = True
    offset_norms = True
    by_key_head = True
    """The order of rows in `in_proj_qkvz` and `in_proj_ba`."""
    unlisted_lora_targets: tuple[str, ...] = ("in_proj_qkvz", "in_proj_ba", "out_proj")
    default_interval = 4
    gate_names: tuple[str | None, ...] = (None,)
    """What `output_gate_type` may be: SiLU, or nothing said of it."""
    reason_for_untied = "SGLang 0.5.23 never ties Qwen3-Next's lm_head"

    def check(self, config: Config) -> None:
        missing = [key for key in SIZES if config.get(key) is None]
        if "num_experts" in missing and config.get("num_local_experts") is not None:
            missing.remove("num_experts")
        if missing:
            raise InvalidValueError(
                f"config.json: {len(missing)} of the {len(SIZES)} sizes of a {self.name} are missing: "
                f"{', '.join(map(repr, missing))}; expected positive integers"
            )
        sglang = "SGLang 0.5.23 has no other"
        if config.get("mlp_only_layers"):
            raise InvalidValueError(
                f"config.json: 'mlp_only_layers' is {config['mlp_only_layers']!r}; only an empty list can be used: "
                "SGLang 0.5.23 builds routed experts in every layer"
            )
        for key, value, reason in (
            ("decoder_sparse_step", 1, "SGLang 0.5.23 builds routed experts in every layer"),
            ("tie_word_embeddings", False, self.reason_for_untied),
            ("hidden_act", "silu", "the kernels compute SiLU"),
            ("attention_bias", False, sglang),
            ("attn_output_gate", True, "Hugging Face's attention always has the gate"),
            ("mamba_ssm_dtype", "float32", "the states are kept in float32"),
            ("use_sliding_window", False, sglang),
        ):
            if config.get(key) is not None:
                require(config, key, value, reason)
        if config.get("output_gate_type") not in self.gate_names:
            require(config, "output_gate_type", self.gate_names[-1], "Hugging Face's gate is SiLU")
        require_plain_rotary(config, "the twin's tables were compared with SGLang's for this one only")
        self.shared_intermediate(config)
        self.delta_sizes(config)
        self._check_heads(config)
        self._check_layers(config)

    def _check_heads(self, config: Config) -> None:
        keys, values = integer(config, "linear_num_key_heads"), integer(config, "linear_num_value_heads")
        if values % keys:
            raise InvalidValueError(
                f"config.json: 'linear_num_value_heads' is {values}; expected a multiple of 'linear_num_key_heads', "
                f"which is {keys}"
            )
        taps = integer(config, "linear_conv_kernel_dim")
        if not 2 <= taps <= MOST_TAPS:
            raise InvalidValueError(f"config.json: 'linear_conv_kernel_dim' is {taps}; allowed: 2 to {MOST_TAPS}")

    def _check_layers(self, config: Config) -> None:
        kinds, expected = config.get("layer_types"), self.layer_types(config)
        if kinds is not None and list(kinds) != expected:
            raise InvalidValueError(
                f"config.json: 'layer_types' is {kinds!r}; with 'full_attention_interval' {self.interval(config)} "
                f"SGLang 0.5.23 builds {expected!r}"
            )
        if FULL not in expected or LINEAR not in expected:
            raise InvalidValueError(
                f"config.json: 'full_attention_interval' is {self.interval(config)} with "
                f"{len(expected)} layers; expected layers of both kinds"
            )

    def interval(self, config: Config) -> int:
        """Every such layer has full attention; transformers 5 writes `layer_types` alone."""
        if config.get("full_attention_interval") is not None:
            return integer(config, "full_attention_interval")
        kinds = list(config.get("layer_types") or ())
        return kinds.index(FULL) + 1 if FULL in kinds else self.default_interval

    def layer_types(self, config: Config) -> list[str]:
        interval = self.interval(config)
        return [FULL if (i + 1) % interval == 0 else LINEAR for i in range(integer(config, "num_hidden_layers"))]

    def is_offset(self, name: str) -> bool:
        return name.endswith("norm.weight") and ".linear_attn." not in name

    def missing_keys(self, config: Config) -> dict[str, Any]:
        rope = config.get("rope_parameters") or {}
        written = {
            "full_attention_interval": self.interval(config),
            **{key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope},
        }
        return {key: value for key, value in written.items() if config.get(key) is None}

    def delta_sizes(self, config: Config) -> tuple[int, int, int, int]:
        """Key heads, value heads, elements of a key, of a value."""
        return (
            integer(config, "linear_num_key_heads"),
            integer(config, "linear_num_value_heads"),
            integer(config, "linear_key_head_dim"),
            integer(config, "linear_value_head_dim"),
        )

    def attending_layers(self, config: Config) -> int:
        return self.layer_types(config).count(FULL)

    def state_numbers(self, config: Config) -> tuple[int, int]:
        """The last inputs of the convolution, and the delta rule's state [HV, K, V]."""
        key_heads, value_heads, key_size, value_size = self.delta_sizes(config)
        channels = 2 * key_heads * key_size + value_heads * value_size
        layers, inputs = self.layer_types(config).count(LINEAR), integer(config, "linear_conv_kernel_dim") - 1
        return layers * channels * inputs, layers * value_heads * key_size * value_size

    def linears_of(self, config: Config, layer: int) -> list[FusedLinear]:
        hidden = integer(config, "hidden_size")
        if self.layer_types(config)[layer] == LINEAR:
            key_heads, value_heads, key_size, value_size = self.delta_sizes(config)
            keys, values = key_heads * key_size, value_heads * value_size
            return [
                FusedLinear(
                    "linear_attn",
                    "in_proj_qkvz",
                    hidden,
                    self.input_parts(keys, values),
                    ATTENTION,
                    pieces=self.input_pieces(keys, values),
                ),
                FusedLinear("linear_attn", "in_proj_ba", hidden, self.gate_parts(value_heads), ATTENTION),
                FusedLinear("linear_attn", "out_proj", values, (("out_proj", hidden),), ATTENTION),
            ]
        query, key = self.widths(config)
        parts = (("q_proj", 2 * query), ("k_proj", key), ("v_proj", key))
        return [
            FusedLinear("self_attn", "qkv_proj", hidden, parts, ATTENTION),
            FusedLinear("self_attn", "o_proj", query, (("o_proj", hidden),), ATTENTION),
        ]

    def input_parts(self, keys: int, values: int) -> tuple[tuple[str, int], ...]:
        """transformers' linears of `in_proj_qkvz`, with their rows."""
        return (("in_proj_qkvz", 2 * keys + 2 * values),)

    def input_pieces(self, keys: int, values: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """As `FusedLinear.pieces`. Rows by key head are split by key head."""
        return ()

    def gate_parts(self, value_heads: int) -> tuple[tuple[str, int], ...]:
        """transformers' linears of `in_proj_ba`, with their rows."""
        return (("in_proj_ba", 2 * value_heads),)

    def norms_of(self, config: Config, layer: int) -> dict[str, int]:
        if self.layer_types(config)[layer] == LINEAR:
            return {"linear_attn.norm": integer(config, "linear_value_head_dim")}
        head = self.head_dim(config)
        return {"self_attn.q_norm": head, "self_attn.k_norm": head}

    def other_tensors(self, config: Config, layer: int) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {"mlp.shared_expert_gate.weight": (1, integer(config, "hidden_size"))}
        if self.layer_types(config)[layer] == FULL:
            return found
        key_heads, value_heads, key_size, value_size = self.delta_sizes(config)
        channels = 2 * key_heads * key_size + value_heads * value_size
        return found | {
            "linear_attn.conv1d.weight": (channels, 1, integer(config, "linear_conv_kernel_dim")),
            "linear_attn.A_log": (value_heads,),
            "linear_attn.dt_bias": (value_heads,),
        }

    def engine_name(self, ours: str) -> str:
        return self.stored_name(ours).replace(".self_attn.", ".")

    def rotary_table_of(self, config: Config) -> str:
        return f"model.layers.{self.layer_types(config).index(FULL)}.rotary_emb.cos_sin_cache"

    def heads_to_split(self, config: Config) -> dict[str, int]:
        # Each key head has as many value heads, and as many channels.
        return {**super().heads_to_split(config), "heads of linear attention": self.delta_sizes(config)[0]}

    def shared_intermediate(self, config: Config) -> int:
        return integer(config, "shared_expert_intermediate_size")

    def normalises(self, config: Config) -> bool:
        return bool(config.get("norm_topk_prob", True))

    def num_experts(self, config: Config) -> int:
        return integer(config, "num_experts", "num_local_experts")

    def shared_gate(self, layer: int) -> str:
        return f"model.layers.{layer}.mlp.shared_expert_gate.weight"

    def _stack_attention(self, config: Config, layer: int) -> GroupedQuery | GatedDelta:
        prefix = f"model.layers.{layer}"
        if self.layer_types(config)[layer] == FULL:
            return GroupedQuery(
                qkv=f"{prefix}.qkv_proj.weight",
                qkv_bias=None,
                query_norm=f"{prefix}.q_norm.weight",
                key_norm=f"{prefix}.k_norm.weight",
                out=f"{prefix}.o_proj.weight",
                out_bias=None,
                is_gated=True,
            )
        return GatedDelta(
            inputs=f"{prefix}.linear_attn.in_proj_qkvz.weight",
            gates=f"{prefix}.linear_attn.in_proj_ba.weight",
            filter=f"{prefix}.linear_attn.conv1d.weight",
            log_rate=f"{prefix}.linear_attn.A_log",
            bias=f"{prefix}.linear_attn.dt_bias",
            norm=f"{prefix}.linear_attn.norm.weight",
            out=f"{prefix}.linear_attn.out_proj.weight",
            key_heads=integer(config, "linear_num_key_heads"),
            by_key_head=self.by_key_head,
        )
