"""The Hugging Face config of a GGUF file's keys.

Keys: https://github.com/ggml-org/llama.cpp, gguf-py/gguf/constants.py; their meaning: src/llama-hparams.cpp and the
models' files in src/models. A GLM-4.7-Flash is a `deepseek2`, and read as the DeepSeek-V3 that it is but for its name.
Layers after the last one, for multi-token prediction (`nextn_predict_layers`), are skipped. `OF_LLAMA_CPP` has what
llama.cpp states in its source instead of a key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kt_runtime.errors import CheckpointError, UnknownNameError

Keys = Mapping[str, Any]
Read = Callable[[str], Sequence[float]]

OF_LLAMA_CPP: Mapping[str, Mapping[str, Any]] = {
    "gpt_oss": {"swiglu_limit": 7.0, "swiglu_alpha": 1.702},  # llm_graph_context::build_moe_ffn
    "llama4_text": {  # src/models/llama4.cpp
        "attention_chunk_size": 8192,
        "floor_scale": 8192,
        "attn_scale": 0.1,
        "attn_temperature_tuning": True,
    },
}
"""Values that llama.cpp computes with, whatever a model's config says, by `model_type`."""
GLM_5_2_POSITIONS = 1 << 20
WITHOUT_QK_NORM_EXPERTS = 128  # a llama4 of so many experts (Maverick) has no norms of queries and keys
_ROPE_FREQS = "rope_freqs.weight"
_PATTERN = "attention.sliding_window_pattern"
_SOFTMAX, _SIGMOID = 1, 2  # expert_gating_func


def config_of(
    keys: Keys, shapes: Mapping[str, tuple[int, ...]], where: str, read: Read | None = None
) -> dict[str, Any]:
    """The content of a config.json for a file with these keys and tensors [outermost dimension first]. `read`: returns
    the numbers of a vector of the file.

    Raises UnknownNameError for an architecture without a family, CheckpointError for a missing or wrong key.
    """
    architecture = keys.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in _ARCHITECTURES:
        raise UnknownNameError("architecture of a GGUF file", str(architecture)[:80], _ARCHITECTURES, where)
    return _ARCHITECTURES[architecture](_Reader(keys, shapes, architecture, where, read))


@dataclass(frozen=True)
class _Reader:
    keys: Keys
    shapes: Mapping[str, tuple[int, ...]]
    architecture: str
    where: str
    read: Read | None = None

    def number(self, key: str, default: int | None = None) -> int:
        found = self._found(key, default)
        if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found < 1 << 31:
            raise self.error(key, found, "an integer from 0 to 2^31")
        return found

    def real(self, key: str, default: float | None = None) -> float:
        found = self._found(key, default)
        if isinstance(found, bool) or not isinstance(found, int | float) or not abs(found) < 1e30:
            raise self.error(key, found, "a number")
        # Files hold float32; the shortest decimal number that rounds to it is what was meant.
        return float(f"{found:.7g}")

    def flag(self, key: str, default: bool) -> bool:
        found = self._found(key, default)
        if not isinstance(found, bool):
            raise self.error(key, found, "true or false")
        return found

    def flags(self, key: str, length: int) -> list[bool]:
        found = self._found(key, None)
        if not isinstance(found, list) or len(found) != length or not all(isinstance(one, bool) for one in found):
            raise self.error(key, found, f"{length} booleans, one for each layer")
        return found

    def numbers(self, key: str, length: int) -> list[int]:
        found = self._found(key, None)
        if not isinstance(found, list) or len(found) != length or not all(type(one) is int for one in found):
            raise self.error(key, found, f"{length} integers")
        return found

    def has(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self.keys

    def _found(self, key: str, default: Any) -> Any:
        found = self.keys.get(f"{self.architecture}.{key}", default)
        if found is None:
            raise CheckpointError(f"{self.where}: key '{self.architecture}.{key}' is missing")
        return found

    def error(self, key: str, found: Any, expected: str) -> CheckpointError:
        shown = str(found)[:80]
        return CheckpointError(f"{self.where}: key '{self.architecture}.{key}' is {shown}; expected {expected}")

    def common(self) -> dict[str, Any]:
        """The keys that all architectures share."""
        embedding = self.shapes.get("token_embd.weight")
        if embedding is None or len(embedding) != 2:
            raise CheckpointError(f"{self.where}: tensor 'token_embd.weight' is missing, or no matrix")
        config: dict[str, Any] = {
            "attention_bias": False,
            "hidden_act": "silu",
            "hidden_size": self.number("embedding_length"),
            "max_position_embeddings": self.number("context_length"),
            "num_attention_heads": self.number("attention.head_count"),
            "num_experts_per_tok": self.number("expert_used_count"),
            "num_hidden_layers": self._layers(),
            "rms_norm_eps": self.real("attention.layer_norm_rms_epsilon"),
            "rope_theta": self.real("rope.freq_base", 10000.0),
            "rope_scaling": self._rope_scaling(),
            "tie_word_embeddings": "output.weight" not in self.shapes,
            "torch_dtype": "bfloat16",
            "vocab_size": embedding[0],
        }
        for name, key in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
            found = self.keys.get(f"tokenizer.ggml.{key}_token_id")
            if isinstance(found, int) and not isinstance(found, bool) and found < embedding[0]:
                config[name] = found
        return config

    def _layers(self) -> int:
        """Number of layers, compared with the file's tensors before anything is allocated for each layer."""
        found, spare = self.number("block_count"), self.number("nextn_predict_layers", 0)
        blocks = {name.split(".", 2)[1] for name in self.shapes if name.startswith("blk.")}
        if not found or found > len(blocks):
            raise self.error("block_count", found, f"1 to {len(blocks)}, the number of layers with tensors")
        if spare >= found:
            raise self.error("nextn_predict_layers", spare, f"less than the {found} of block_count")
        return found - spare

    def _rope_scaling(self) -> dict[str, Any] | None:
        kind = self.keys.get(f"{self.architecture}.rope.scaling.type", "none")
        if kind == "none":
            return None
        if kind != "yarn":
            raise self.error("rope.scaling.type", kind, "none or yarn")
        scaling: dict[str, Any] = {
            "type": "yarn",
            "factor": self.real("rope.scaling.factor"),
            "original_max_position_embeddings": self.number("rope.scaling.original_context_length"),
            "beta_fast": self.real("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": self.real("rope.scaling.yarn_beta_slow", 1.0),
        }
        if self.has("rope.scaling.yarn_log_multiplier"):
            # llama.cpp's converter stores a tenth of DeepSeek's mscale_all_dim, which equals mscale there.
            scaling["mscale"] = scaling["mscale_all_dim"] = round(
                self.real("rope.scaling.yarn_log_multiplier") / 0.1, 6
            )
        return scaling


def _qwen3_moe(file: _Reader) -> dict[str, Any]:
    return {
        **file.common(),
        "intermediate_size": file.number("feed_forward_length"),
        "moe_intermediate_size": file.number("expert_feed_forward_length"),
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "head_dim": file.number("attention.key_length"),
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "num_experts": file.number("expert_count"),
        "num_key_value_heads": file.number("attention.head_count_kv"),
    }


def _deepseek(file: _Reader) -> dict[str, Any]:
    rope = file.number("rope.dimension_count")
    has_bias = any(name.endswith("exp_probs_b.bias") for name in file.shapes)
    gating = file.number("expert_gating_func", _SIGMOID if has_bias else _SOFTMAX)
    if gating not in (_SOFTMAX, _SIGMOID):
        raise file.error("expert_gating_func", gating, f"{_SOFTMAX} (softmax) or {_SIGMOID} (sigmoid)")
    groups = file.number("expert_group_count", 1)
    version = _deepseek_v3() if gating == _SIGMOID else _deepseek_v2(groups)
    return {
        **file.common(),
        "intermediate_size": file.number("feed_forward_length"),
        **version,
        "moe_intermediate_size": file.number("expert_feed_forward_length"),
        "first_k_dense_replace": file.number("leading_dense_block_count"),
        "kv_lora_rank": file.number("attention.kv_lora_rank"),
        "moe_layer_freq": 1,
        "n_group": groups,
        "n_routed_experts": file.number("expert_count"),
        "n_shared_experts": file.number("expert_shared_count"),
        "norm_topk_prob": file.flag("expert_weights_norm", gating == _SIGMOID),
        "num_key_value_heads": file.number("attention.head_count"),
        "num_nextn_predict_layers": 0,
        "q_lora_rank": file.number("attention.q_lora_rank") if file.has("attention.q_lora_rank") else None,
        # Files from before MLA's own keys have the sizes of a head under the plain ones.
        "qk_nope_head_dim": file.number("attention.key_length_mla", file.number("attention.key_length")) - rope,
        "qk_rope_head_dim": rope,
        "routed_scaling_factor": file.real("expert_weights_scale", 1.0),
        "topk_group": file.number("expert_group_used_count", 1),
        "v_head_dim": file.number("attention.value_length_mla", file.number("attention.value_length")),
    }


def _deepseek_v3() -> dict[str, Any]:
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }


def _deepseek_v2(groups: int) -> dict[str, Any]:
    return {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "scoring_func": "softmax",
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
    }


def _with_indexer(file: _Reader) -> dict[str, Any]:
    """The keys that DeepSeek-V3.2 and GLM-5 share."""
    _require_sigmoid(file)
    return {
        **_deepseek(file),
        "index_head_dim": file.number("attention.indexer.key_length"),
        "index_n_heads": file.number("attention.indexer.head_count"),
        "index_topk": file.number("attention.indexer.top_k"),
    }


def _deepseek_v32(file: _Reader) -> dict[str, Any]:
    return {**_with_indexer(file), "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"}


def _glm_moe_dsa(file: _Reader) -> dict[str, Any]:
    config = _with_indexer(file)
    theta = config.pop("rope_theta")
    if config.pop("rope_scaling") is not None:
        raise file.error("rope.scaling.type", "yarn", "none")
    layers, key = config["num_hidden_layers"], "attention.indexer.types"
    if file.has(key):
        full = file.flags(key, layers)
    else:  # as llama.cpp: a GLM-5.2 is known by its long context
        is_shared = config["max_position_embeddings"] >= GLM_5_2_POSITIONS
        full = [not is_shared or layer < 2 or layer % 4 == 2 for layer in range(layers)]
    return {
        **config,
        "architectures": ["GlmMoeDsaForCausalLM"],
        "indexer_rope_interleave": True,
        "indexer_types": ["full" if one else "shared" for one in full],
        "model_type": "glm_moe_dsa",
        "rope_interleave": True,
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
    }


def _mixtral(file: _Reader) -> dict[str, Any]:
    if file.number("expert_count", 0) < 2:
        raise CheckpointError(f"{file.where}: is a llama without experts; of this architecture Mixtral is served")
    foreign = next((name for name in file.shapes if name == "rope_freqs.weight" or name.endswith(".bias")), None)
    if foreign is not None:
        raise CheckpointError(f"{file.where}: has a tensor {foreign!r}, which a Mixtral has not")
    config = file.common()
    return {
        **config,
        "intermediate_size": file.number("feed_forward_length"),
        "architectures": ["MixtralForCausalLM"],
        "head_dim": file.number("rope.dimension_count", config["hidden_size"] // max(1, config["num_attention_heads"])),
        "model_type": "mixtral",
        "num_key_value_heads": file.number("attention.head_count_kv"),
        "num_local_experts": file.number("expert_count"),
        "sliding_window": None,
    }


def _olmoe(file: _Reader) -> dict[str, Any]:
    return {
        **file.common(),
        "intermediate_size": file.number("feed_forward_length"),
        "architectures": ["OlmoeForCausalLM"],
        "clip_qkv": None,
        "model_type": "olmoe",
        "norm_topk_prob": False,
        "num_experts": file.number("expert_count"),
        "num_key_value_heads": file.number("attention.head_count_kv"),
    }


def _gpt_oss(file: _Reader) -> dict[str, Any]:
    config = file.common()
    layers, scaling = config["num_hidden_layers"], config["rope_scaling"]
    if scaling is not None:
        kind = scaling.pop("type")
        # llama.cpp rounds the bounds of the ramp, which the published models do not; a file does not say.
        scaling |= {"rope_type": kind, "truncate": False}
    if isinstance(file.keys.get(f"{file.architecture}.{_PATTERN}"), list):
        slides = file.flags(_PATTERN, layers)
    else:  # llama_hparams::set_swa_pattern
        period = file.number(_PATTERN, 2)
        slides = [period == 0 or layer % period < period - 1 for layer in range(layers)]
    return {
        **config,
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "experts_per_token": config["num_experts_per_tok"],
        "head_dim": file.number("attention.key_length"),
        "intermediate_size": file.number("expert_feed_forward_length"),
        "layer_types": ["sliding_attention" if one else "full_attention" for one in slides],
        "model_type": "gpt_oss",
        "num_key_value_heads": file.number("attention.head_count_kv"),
        "num_local_experts": file.number("expert_count"),
        "sliding_window": file.number("attention.sliding_window"),
        "swiglu_limit": OF_LLAMA_CPP["gpt_oss"]["swiglu_limit"],
    }


def _delta_net(file: _Reader) -> dict[str, Any]:
    """The keys that Qwen3-Next and Qwen3.5 share."""
    config = file.common()
    layers, interval = config["num_hidden_layers"], file.number("full_attention_interval", 4)
    expected = [interval == 0 or (layer + 1) % interval != 0 for layer in range(layers)]
    spare = [False] * file.number("nextn_predict_layers", 0)
    key = "attention.recurrent_layers"
    if file.has(key) and (found := file.flags(key, layers + len(spare))) != expected + spare:
        raise file.error(key, found, f"true for all layers but every {interval}th (full_attention_interval)")
    value_heads, values = file.number("ssm.time_step_rank"), file.number("ssm.inner_size")
    if not value_heads or values % value_heads:
        raise file.error("ssm.inner_size", values, f"a multiple of the {value_heads} heads of ssm.time_step_rank")
    return {
        **config,
        "full_attention_interval": interval,
        "head_dim": file.number("attention.key_length"),
        "linear_conv_kernel_dim": file.number("ssm.conv_kernel"),
        "linear_key_head_dim": file.number("ssm.state_size"),
        "linear_num_key_heads": file.number("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": values // value_heads,
        "moe_intermediate_size": file.number("expert_feed_forward_length"),
        "num_experts": file.number("expert_count"),
        "num_key_value_heads": file.number("attention.head_count_kv"),
        "shared_expert_intermediate_size": file.number("expert_shared_feed_forward_length"),
    }


def _rotated_part(file: _Reader) -> float:
    """`partial_rotary_factor`."""
    head, rotated = file.number("attention.key_length"), file.number("rope.dimension_count")
    if not 0 < rotated <= head:
        raise file.error("rope.dimension_count", rotated, f"1 to {head} (attention.key_length)")
    return rotated / head


def _qwen3_next(file: _Reader) -> dict[str, Any]:
    return {
        **_delta_net(file),
        "architectures": ["Qwen3NextForCausalLM"],
        "decoder_sparse_step": 1,
        "intermediate_size": file.number("feed_forward_length"),
        "mlp_only_layers": [],
        "model_type": "qwen3_next",
        "norm_topk_prob": True,
        "partial_rotary_factor": _rotated_part(file),
    }


def _qwen3_5_moe(file: _Reader) -> dict[str, Any]:
    config = _delta_net(file)
    theta = config.pop("rope_theta")
    if config.pop("rope_scaling") is not None:
        raise file.error("rope.scaling.type", "yarn", "none")
    interval = config["full_attention_interval"]
    kinds = ["linear_attention"] * max(0, interval - 1) + ["full_attention"]
    return {
        **config,
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "attn_output_gate": True,
        "layer_types": [kinds[layer % len(kinds)] for layer in range(config["num_hidden_layers"])],
        "mamba_ssm_dtype": "float32",
        "model_type": "qwen3_5_moe_text",
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": file.numbers("rope.dimension_sections", 4)[:3],
            "rope_type": "default",
            "rope_theta": theta,
            "partial_rotary_factor": _rotated_part(file),
        },
    }


def _llama4(file: _Reader) -> dict[str, Any]:
    if file.number("attention.sliding_window", 1) == 0:
        raise file.error("attention.sliding_window", 0, "no such key: a Llama 4 has chunks")
    config = file.common()
    head = file.number("rope.dimension_count")
    return {
        **config,
        **OF_LLAMA_CPP["llama4_text"],
        "architectures": ["Llama4ForCausalLM"],
        "head_dim": head,
        "interleave_moe_layer_step": file.number("interleave_moe_layer_step"),
        "intermediate_size": file.number("expert_feed_forward_length"),
        "intermediate_size_mlp": file.number("feed_forward_length"),
        "model_type": "llama4_text",
        "no_rope_layers": [int((layer + 1) % 4 != 0) for layer in range(config["num_hidden_layers"])],
        "num_key_value_heads": file.number("attention.head_count_kv"),
        "num_local_experts": file.number("expert_count"),
        "rope_scaling": _llama3_scaling(file, config["rope_theta"], head),
        "use_qk_norm": file.number("expert_count") != WITHOUT_QK_NORM_EXPERTS,
    }


def _llama3_scaling(file: _Reader, theta: float, head: int) -> dict[str, Any] | None:
    """The scaling of the rotary embedding, from the factors of its frequencies: a file has nothing else of it.

    A factor is 1 for short wavelengths and `factor` for long ones. Where there are some between, they are of
    `high_freq_factor` 4 and `low_freq_factor` 1, as in Llama 3; else both are 1, as in Llama 4. The boundary is
    Llama 4's `original_max_position_embeddings`, 8,192.
    """
    if _ROPE_FREQS not in file.shapes or file.read is None:
        return None
    found = file.read(_ROPE_FREQS)
    for high in (1.0, 4.0):
        scaling = {
            "factor": float(f"{max(found):.7g}"),
            "high_freq_factor": high,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        }
        factors = llama3_factors(scaling, theta, head)
        if len(found) == len(factors) and all(
            math.isclose(a, b, rel_tol=1e-4) for a, b in zip(found, factors, strict=True)
        ):
            return scaling
    raise CheckpointError(f"{file.where}: tensor {_ROPE_FREQS!r} is not of a Llama 4's rotary embedding")


def read_for_config(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Tensors of a file from which keys of its config were computed."""
    return (_ROPE_FREQS,) if config["model_type"] == "llama4_text" else ()


def llama3_factors(scaling: Mapping[str, Any], theta: float, head: int) -> list[float]:
    """What llama.cpp divides each frequency by (LlamaModel.generate_extra_tensors)."""
    factor, positions = scaling["factor"], scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]

    def of(wavelength: float) -> float:
        if wavelength < positions / high:
            return 1.0
        if wavelength > positions / low:
            return float(factor)
        smooth = (positions / wavelength - low) / (high - low)
        return 1 / ((1 - smooth) / factor + smooth)

    return [of(2 * math.pi * theta ** (2 * number / head)) for number in range(head // 2)]


def _glm4_moe(file: _Reader) -> dict[str, Any]:
    _require_sigmoid(file)
    head = file.number("attention.key_length")
    return {
        **file.common(),
        "architectures": ["Glm4MoeForCausalLM"],
        "attention_bias": any(name.endswith(".attn_q.bias") for name in file.shapes),
        "first_k_dense_replace": file.number("leading_dense_block_count"),
        "head_dim": head,
        "intermediate_size": file.number("feed_forward_length"),
        "model_type": "glm4_moe",
        "moe_intermediate_size": file.number("expert_feed_forward_length"),
        "n_group": 1,
        "n_routed_experts": file.number("expert_count"),
        "n_shared_experts": file.number("expert_shared_count"),
        "norm_topk_prob": file.flag("expert_weights_norm", True),
        "num_key_value_heads": file.number("attention.head_count_kv"),
        "partial_rotary_factor": file.number("rope.dimension_count") / max(1, head),
        "routed_scaling_factor": file.real("expert_weights_scale", 1.0),
        "topk_group": 1,
        "use_qk_norm": any(name.endswith(".attn_q_norm.weight") for name in file.shapes),
    }


def _minimax_m2(file: _Reader) -> dict[str, Any]:
    _require_sigmoid(file)
    return {
        **file.common(),
        "architectures": ["MiniMaxM2ForCausalLM"],
        "head_dim": file.number("attention.key_length"),
        "intermediate_size": file.number("expert_feed_forward_length"),
        "model_type": "minimax_m2",
        "num_key_value_heads": file.number("attention.head_count_kv"),
        "num_local_experts": file.number("expert_count"),
        "qk_norm_type": "per_layer",
        "rotary_dim": file.number("rope.dimension_count"),
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "use_qk_norm": True,
        "use_routing_bias": True,
    }


def _require_sigmoid(file: _Reader) -> None:
    gating = file.number("expert_gating_func", _SIGMOID)
    if gating != _SIGMOID:
        raise file.error("expert_gating_func", gating, f"{_SIGMOID} (sigmoid)")


_ARCHITECTURES: dict[str, Callable[[_Reader], dict[str, Any]]] = {
    "qwen3moe": _qwen3_moe,
    "deepseek2": _deepseek,
    "deepseek32": _deepseek_v32,
    "glm-dsa": _glm_moe_dsa,
    "llama": _mixtral,
    "olmoe": _olmoe,
    "gpt-oss": _gpt_oss,
    "qwen3next": _qwen3_next,
    "qwen35moe": _qwen3_5_moe,
    "llama4": _llama4,
    "glm4moe": _glm4_moe,
    "minimax-m2": _minimax_m2,
}
ARCHITECTURES = tuple(_ARCHITECTURES)
"""The architectures that are served; each was compared with llama.cpp."""
