"""A GGUF file of llama.cpp as a checkpoint: the Hugging Face config of its keys, and the names of its tensors.

Keys: https://github.com/ggml-org/llama.cpp, gguf-py/gguf/constants.py; their meaning: src/llama-hparams.cpp and the
models' files in src/models. Names: gguf-py/gguf/tensor_mapping.py. Mixtral is a `llama` with experts. Its rotary
embedding turns adjacent elements in llama.cpp, so that the converter interleaves the halves of each head of the query
and key matrices (`LlamaModel.permute` in convert_hf_to_gguf.py); the other architectures' rows stay as they are.

A GLM-4.7-Flash is a `deepseek2`, and read as the DeepSeek-V3 that it is but for its name. Layers behind the last, for
multi-token prediction (`nextn_predict_layers`), are read past.

MLA's `kv_b_proj` is one tensor, or split by head: attn_k_b [heads, latent, nope], which is transposed, and attn_v_b
[heads, value, latent].
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from kt_runtime.errors import CheckpointError, UnknownNameError

Keys = Mapping[str, Any]
KV_B = ".self_attn.kv_b_proj.weight"
EXPERT_TENSORS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")

_SOFTMAX, _SIGMOID = 1, 2  # expert_gating_func
_LAYER = re.compile(r"blk\.(\d{1,9})\.")
_OF_MODEL = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_OF_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
_OTHERWISE = {"glm4_moe": {"post_attention_layernorm": "post_attention_norm"}}
"""Of a layer, by `model_type`, where they differ from `_OF_LAYER`."""


def gguf_name(config: Mapping[str, Any], name: str) -> str:
    """The tensor of a GGUF file that holds the Hugging Face tensor `name`, which is not of a routed expert."""
    if name.endswith(".e_score_correction_bias"):
        return f"blk.{name.split('.')[2]}.exp_probs_b.bias"
    module, _, kind = name.rpartition(".")
    if module in _OF_MODEL:
        return f"{_OF_MODEL[module]}.{kind}"
    layer, _, inner = module.removeprefix("model.layers.").partition(".")
    otherwise = _OTHERWISE.get(config["model_type"], {})
    return f"blk.{layer}.{otherwise.get(inner) or _OF_LAYER[inner]}.{kind}"


def layer_of(name: str) -> int:
    """The layer of a GGUF file's tensor; -1: it is of no layer."""
    match = _LAYER.match(name)
    return -1 if match is None else int(match[1])


def interleaved_heads(config: Mapping[str, Any], name: str) -> int:
    """Heads of the Hugging Face tensor `name` whose halves are interleaved in the file; 0: its rows are as they are."""
    if config["model_type"] != "mixtral":
        return 0
    keys = {".self_attn.q_proj.weight": "num_attention_heads", ".self_attn.k_proj.weight": "num_key_value_heads"}
    return next((int(config[key]) for end, key in keys.items() if name.endswith(end)), 0)


def split_kv_b(config: Mapping[str, Any], name: str) -> tuple[str, str]:
    """The two tensors of a `kv_b_proj` that is split by head: of keys and of values."""
    whole = gguf_name(config, name)
    return whole.replace("attn_kv_b", "attn_k_b"), whole.replace("attn_kv_b", "attn_v_b")


def expert_prefix(layer: int) -> str:
    """The prefix of a layer's experts for the native loader (csrc/weights/gguf_layer.h)."""
    return f"blk.{layer}"


def config_of(keys: Keys, shapes: Mapping[str, tuple[int, ...]], where: str) -> dict[str, Any]:
    """The content of a config.json for a file with these keys and tensors [outermost dimension first].

    Raises UnknownNameError for an architecture without a family, CheckpointError for a missing or wrong key.
    """
    architecture = keys.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in _ARCHITECTURES:
        raise UnknownNameError("architecture of a GGUF file", str(architecture)[:80], _ARCHITECTURES, where)
    return _ARCHITECTURES[architecture](_Reader(keys, shapes, architecture, where))


@dataclass(frozen=True)
class _Reader:
    keys: Keys
    shapes: Mapping[str, tuple[int, ...]]
    architecture: str
    where: str

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
        """What the architectures share; `moe_intermediate_size` only where a file has a size of the experts alone."""
        embedding = self.shapes.get("token_embd.weight")
        if embedding is None or len(embedding) != 2:
            raise CheckpointError(f"{self.where}: tensor 'token_embd.weight' is missing, or no matrix")
        config: dict[str, Any] = {
            "attention_bias": False,
            "hidden_act": "silu",
            "hidden_size": self.number("embedding_length"),
            "intermediate_size": self.number("feed_forward_length"),
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
        """Compared with the file's layers before anything is made for each of so many."""
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


def _mixtral(file: _Reader) -> dict[str, Any]:
    if file.number("expert_count", 0) < 2:
        raise CheckpointError(f"{file.where}: is a llama without experts; of this architecture Mixtral is served")
    foreign = next((name for name in file.shapes if name == "rope_freqs.weight" or name.endswith(".bias")), None)
    if foreign is not None:
        raise CheckpointError(f"{file.where}: has a tensor {foreign!r}, which a Mixtral has not")
    config = file.common()
    return {
        **config,
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
        "architectures": ["OlmoeForCausalLM"],
        "clip_qkv": None,
        "model_type": "olmoe",
        "norm_topk_prob": False,
        "num_experts": file.number("expert_count"),
        "num_key_value_heads": file.number("attention.head_count_kv"),
    }


def _glm4_moe(file: _Reader) -> dict[str, Any]:
    _require_sigmoid(file)
    head = file.number("attention.key_length")
    return {
        **file.common(),
        "architectures": ["Glm4MoeForCausalLM"],
        "attention_bias": any(name.endswith(".attn_q.bias") for name in file.shapes),
        "first_k_dense_replace": file.number("leading_dense_block_count"),
        "head_dim": head,
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
    "llama": _mixtral,
    "olmoe": _olmoe,
    "glm4moe": _glm4_moe,
    "minimax-m2": _minimax_m2,
}
ARCHITECTURES: Collection[str] = tuple(_ARCHITECTURES)
"""`general.architecture` of the files that can be read."""

_PACKED: Mapping[str, tuple[str, int, int, int, int]] = {
    "BF16": ("bf16", 16, 0, 0, 0),
    "Q8_0": ("int8_g32", 8, 32, 2, 0),
    "Q4_0": ("int4_g32", 4, 32, 2, 0),
    "Q5_0": ("int5_g32", 5, 32, 2, 0),
    "MXFP4": ("mxfp4_g32", 4, 32, 1, 0),
    "Q4_K": ("int4k_g32", 4, 32, 1, 4),
    "Q5_K": ("int5k_g32", 5, 32, 1, 4),
    "Q6_K": ("int6k_g16", 6, 16, 1, 2),
    "IQ4_NL": ("iq4_g32", 4, 32, 2, 0),
    "IQ4_XS": ("iq4k_g32", 4, 32, 1, 2),
}
"""Type of experts → the store's format, bits of a code, columns of a group, bytes of its scale, bytes for 256 columns:
4 where groups have minima (csrc/kernels/layout.h)."""
EXPERT_TYPES: Collection[str] = tuple(_PACKED)
DENSE_TYPES: Collection[str] = tuple(kind for kind in _PACKED if kind != "BF16")
"""Types of linear layers' matrices that stay quantized."""


def packed_tensors(config: Mapping[str, Any]) -> Mapping[str, str]:
    """Hugging Face's name of each tensor of a linear layer that stays quantized on a CPU, and its type. `config`: the
    content of config.json, of any checkpoint."""
    settings = config.get("quantization_config") or {}
    dense = settings.get("dense") if settings.get("quant_method") == "gguf" else None
    return dense or {}


def packed_name(kind: str) -> str:
    """The store's name of the format in which experts of this type are held."""
    return _PACKED[kind][0]


def packed_bytes(kind: str, rows: int, cols: int) -> int:
    """Bytes of one matrix in the packed layout of csrc/kernels/layout.h. `cols`: whole blocks of the type."""
    _, bits, group, scale_bytes, super_bytes = _PACKED[kind]
    block_bytes = cols * 16 * bits // 8
    if group:
        groups, supers = cols // group, ceil(cols / 256)
        with_minima = 2 if super_bytes == 4 else 1
        block_bytes += 64 + with_minima * _lines(groups * 16 * scale_bytes)
        block_bytes += with_minima * _lines(supers * 32) if super_bytes else 0
    return ceil(rows / 16) * block_bytes


def _lines(size: int) -> int:
    return -(-size // 64) * 64


def expert_types(shapes_and_types: Mapping[str, str], layers: Collection[int], where: str) -> list[tuple[str, str]]:
    """The types (of gate and up, of down) of each layer's experts. `shapes_and_types`: type of each tensor.

    Raises CheckpointError for a missing tensor, and for a type that no kernel has.
    """
    return [_layer_types(shapes_and_types, layer, where) for layer in layers]


def _layer_types(types: Mapping[str, str], layer: int, where: str) -> tuple[str, str]:
    found = []
    for tensor in EXPERT_TENSORS:
        name = f"{expert_prefix(layer)}.{tensor}.weight"
        if name not in types:
            raise CheckpointError(f"{where}: tensor {name!r} is missing: layer {layer} lacks experts")
        if types[name] not in EXPERT_TYPES:
            raise CheckpointError(
                f"{where}: tensor {name!r} has type {types[name]}; experts are served in {', '.join(EXPERT_TYPES)}"
            )
        found.append(types[name])
    gate, up, down = found
    if gate != up:
        raise CheckpointError(f"{where}: layer {layer}: gate is {gate} and up {up}; expected one type for both")
    if (gate == "BF16") != (down == "BF16"):
        raise CheckpointError(f"{where}: layer {layer}: gate is {gate} and down {down}; expected BF16 for all or none")
    return gate, down
