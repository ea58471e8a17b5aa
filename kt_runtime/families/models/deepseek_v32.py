"""DeepSeek-V3.2, and GLM-5, 5.1 and 5.2: a DeepSeek-V3 whose queries see the keys that an indexer chooses for them.

Hugging Face: `transformers.models.deepseek_v32`, `.glm_moe_dsa`. SGLang: `sglang.srt.models.deepseek_v2`, both, and
`.glm4_moe.GlmMoeDsaForCausalLM`, a subclass. The operation: `kt_runtime.ops.indexer`.

- `index_topk`: keys that a query sees. With no more keys before it, it sees all, as in DeepSeek-V3.
- GLM-5.2: layers whose `indexer_types` is "shared" have no indexer, and take the choice of the layer before.
- DeepSeek-V3.2's indexer rotates elements half the rotated part apart, GLM's adjacent ones.
- The indexer is frozen: LoRA does not adapt it, and its choice has no gradient. Its norm (a LayerNorm, epsilon 1e-6)
  and `weights_proj` are float32 here, as Hugging Face keeps `weights_proj`.
- Its keys have the model's dtype, as in Hugging Face. The published program rounds them to fp8 after a Hadamard
  rotation, and so does SGLang on a GPU.
- The latents' norms have `rms_norm_eps` in SGLang, and so in the twin; Hugging Face gives them 1e-6.
- Layers of multi-token prediction (`num_nextn_predict_layers`) are in neither model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kt_runtime.errors import InvalidValueError
from kt_runtime.families.base import Config, integer, require
from kt_runtime.families.models.glm4_moe import Glm4MoeLite
from kt_runtime.families.stack import DecoderStack, Indexer, Latent, StackLayer
from kt_runtime.families.traits import INDEXER

FULL, SHARED = "full", "shared"
WITHOUT_EFFECT = {"index_kpool": 1, "index_k_norm_type": "layer", "index_init_tokens": 0, "index_local_tokens": 0}
"""Keys of other models with an indexer, which SGLang reads, and the values with which they do nothing."""


class DeepseekV32(Glm4MoeLite):
    name = "deepseek_v32"
    model_types = ("deepseek_v32",)
    architectures = ("DeepseekV32ForCausalLM",)
    traits = replace(Glm4MoeLite.traits, parts=frozenset({INDEXER}))
    default_epsilon = 1e-6
    routing_defaults: Mapping[str, Any] = {"norm_topk_prob": True, "routed_scaling_factor": 2.5}
    chooses_keys = True
    gguf_architecture = "deepseek32"
    indexer_rotates_adjacent = False

    def check(self, config: Config) -> None:
        super().check(config)
        if config.get("q_lora_rank") is None:
            raise InvalidValueError("config.json: 'q_lora_rank' is missing; the indexer reads compressed queries")
        require(config, "rope_interleave", True, "Hugging Face rotates adjacent elements", default=True)
        require(
            config,
            "indexer_rope_interleave",
            self.indexer_rotates_adjacent,
            "Hugging Face's indexer rotates no other elements",
            default=self.indexer_rotates_adjacent,
        )
        for key, value in WITHOUT_EFFECT.items():
            require(config, key, value, "Hugging Face's indexer does not know it", default=value)
        for key in ("index_topk", "index_n_heads"):
            integer(config, key)
        size, rope = integer(config, "index_head_dim"), integer(config, "qk_rope_head_dim")
        if size < rope:
            raise InvalidValueError(
                f"config.json: 'index_head_dim' is {size}; at least {rope} ('qk_rope_head_dim'), which are rotated"
            )
        self.indexer_types(config)

    def dense_layers(self, config: Config) -> int:
        found = config.get("first_k_dense_replace")
        return found if isinstance(found, int) else 3

    def indexer_types(self, config: Config) -> list[str]:
        """The type of each layer: FULL if it has an indexer, else SHARED. Raises InvalidValueError for any other."""
        layers = integer(config, "num_hidden_layers")
        types = config.get("indexer_types")
        require(config, "index_topk_freq", 1, "every layer of this family has an indexer", default=1)
        if types not in (None, [FULL] * layers):
            raise InvalidValueError(
                f"config.json: 'indexer_types' is {types!r}; in this family every layer has an indexer ({FULL!r})"
            )
        return [FULL] * layers

    def index_size(self, config: Config) -> int:
        return integer(config, "index_head_dim")

    def other_tensors(self, config: Config, layer: int) -> dict[str, tuple[int, ...]]:
        if self.indexer_types(config)[layer] == SHARED:
            return {}
        heads, size = integer(config, "index_n_heads"), integer(config, "index_head_dim")
        hidden = integer(config, "hidden_size")
        return {
            "self_attn.indexer.wq_b.weight": (heads * size, integer(config, "q_lora_rank")),
            "self_attn.indexer.wk.weight": (size, hidden),
            "self_attn.indexer.k_norm.weight": (size,),
            "self_attn.indexer.k_norm.bias": (size,),
            "self_attn.indexer.weights_proj.weight": (heads, hidden),
        }

    def decoder_stack(self, config: Config) -> DecoderStack:
        stack = super().decoder_stack(config)
        types, seen_keys = self.indexer_types(config), integer(config, "index_topk")
        layers = [self._with_indexer(layer, index, types[index], seen_keys) for index, layer in enumerate(stack.layers)]
        return replace(stack, layers=tuple(layers))

    def _with_indexer(self, layer: StackLayer, index: int, kind: str, seen_keys: int) -> StackLayer:
        assert isinstance(layer.attention, Latent)
        prefix = f"model.layers.{index}.self_attn.indexer"
        indexer = Indexer(
            query=f"{prefix}.wq_b.weight",
            key=f"{prefix}.wk.weight",
            norm_weight=f"{prefix}.k_norm.weight",
            norm_bias=f"{prefix}.k_norm.bias",
            weights=f"{prefix}.weights_proj.weight",
            interleaved=self.indexer_rotates_adjacent,
        )
        own = indexer if kind == FULL else None
        return replace(layer, attention=replace(layer.attention, indexer=own, seen_keys=seen_keys))


class GlmMoeDsa(DeepseekV32):
    name = "glm_moe_dsa"
    model_types = ("glm_moe_dsa",)
    architectures = ("GlmMoeDsaForCausalLM",)
    default_epsilon = 1e-5
    gguf_architecture = "glm-dsa"
    indexer_rotates_adjacent = True

    def missing_keys(self, config: Config) -> dict[str, Any]:
        missing = super().missing_keys(config)
        if config.get("indexer_rope_interleave") is None:
            missing["indexer_rope_interleave"] = True
        return missing

    def indexer_types(self, config: Config) -> list[str]:
        """Types from `indexer_types`, else from `index_topk_pattern` of F and S, else every `index_topk_freq`-th layer,
        counted from `index_skip_topk_offset`, as Hugging Face reads them."""
        layers = integer(config, "num_hidden_layers")
        types, pattern = config.get("indexer_types"), config.get("index_topk_pattern")
        key = "indexer_types" if types is not None else "index_topk_pattern"
        if types is None and pattern is not None:
            types = [{"F": FULL, "S": SHARED}.get(letter, letter) for letter in pattern]
        if types is None:
            every, offset = config.get("index_topk_freq") or 1, config.get("index_skip_topk_offset", 2)
            key = "index_topk_freq"
            types = [SHARED if max(layer - offset + 1, 0) % every else FULL for layer in range(layers)]
        if not isinstance(types, list) or len(types) < layers or types[0] != FULL or set(types) - {FULL, SHARED}:
            raise InvalidValueError(
                f"config.json: {key!r} is {config.get(key)!r}; expected {FULL!r} or {SHARED!r} for each of {layers} "
                f"layers, {FULL!r} for the first"
            )
        return list(types[:layers])
