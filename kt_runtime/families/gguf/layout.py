"""How a GGUF file of llama.cpp holds the tensors of a Hugging Face checkpoint.

Names: https://github.com/ggml-org/llama.cpp, gguf-py/gguf/tensor_mapping.py. What its converter also changes
(conversion/*.py, `modify_tensors`):

- Mixtral is a `llama` with experts, whose rotary embedding rotates adjacent elements there: the halves of each head of
  the query and key matrices are interleaved (`LlamaModel.permute`). The other architectures' rows stay as they are.
- MLA's `kv_b_proj` is one tensor, or split by head: attn_k_b [heads, latent, nope], which is transposed, and attn_v_b
  [heads, value, latent].
- Qwen3-Next and Qwen3.5: norms' weights are offsets from one, and one is added, but to the norm after the delta rule;
  ssm_a is -exp(A_log). Qwen3-Next's `in_proj_qkvz` is ordered by key head, and attn_qkv and attn_gate by query, key,
  value, gate (older files have it as ssm_in). Qwen3.5's value heads are ordered by their number within a key head, then
  by key head (`_LinearAttentionVReorderBase`).
- The router, the shared expert's gate, the short convolution and all vectors are float32.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from itertools import chain
from typing import Any

from kt_runtime.families.base import LoraModule
from kt_runtime.families.registry import family_for

Config = Mapping[str, Any]
Order = tuple[int, ...]

EXPERT_TENSORS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
WITH_POST_NORM = (
    "glm4_moe",
    "gpt_oss",
    "qwen3_next",
    "qwen3_5_moe_text",
)  # `post_attention_norm` in place of `ffn_norm`
QWEN3_NEXT, QWEN3_5 = "qwen3_next", "qwen3_5_moe_text"
_LAYER = re.compile(r"blk\.(\d{1,9})\.")
_OF_MODEL = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_OF_LAYER = {
    "input_layernorm": "attn_norm",
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
    "self_attn.indexer.wq_b": "indexer.attn_q_b",
    "self_attn.indexer.wk": "indexer.attn_k",
    "self_attn.indexer.k_norm": "indexer.k_norm",
    "self_attn.indexer.weights_proj": "indexer.proj",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
_OF_MLP = {  # after the family's name of the module
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
    "shared.gate_proj": "ffn_gate_shexp",
    "shared.up_proj": "ffn_up_shexp",
    "shared.down_proj": "ffn_down_shexp",
    "shared_expert_gate": "ffn_gate_inp_shexp",
    "router": "ffn_gate_inp",
}
_WHOLE = {  # without a kind of their own after the last dot
    "self_attn.sinks": "attn_sinks.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "e_score_correction_bias": "exp_probs_b.bias",
}
_FLOAT32 = ("ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "ssm_conv1d.weight")


class Values(Enum):
    """What the file's numbers are of the Hugging Face tensor's x. SPLIT_BY_HEAD: of MLA's `kv_b_proj` in two parts."""

    SAME = "x"
    PLUS_ONE = "x + 1"
    DECAY = "-exp(x)"
    SPLIT_BY_HEAD = "x by head"


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of the file. `shape`: the outermost dimension first."""

    name: str
    shape: tuple[int, ...]

    @property
    def is_float32(self) -> bool:
        return len(self.shape) == 1 or self.name.endswith(_FLOAT32)

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor has this shape; dimensions of one element do not count."""
        return [size for size in shape if size != 1] == [size for size in self.shape if size != 1]


@dataclass(frozen=True, slots=True)
class Held:
    """How a file holds the Hugging Face tensor `name` of `shape`.

    The rows of `parts`, below each other, are its rows: that at place i is the Hugging Face row `rows[i]`. `columns` in
    the same way. None: in the same order.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    rows: Order | None = None
    columns: Order | None = None
    values: Values = Values.SAME

    @property
    def is_matrix_as_it_is(self) -> bool:
        """Whether it is one matrix of the file, perhaps with its rows in another order: its blocks can stay packed."""
        whole = len(self.parts) == 1 and len(self.shape) == 2
        return whole and self.columns is None and self.values is Values.SAME


def held(config: Config, name: str, shape: tuple[int, ...], present: Collection[str]) -> Held:
    """How a file with the tensors `present` holds the Hugging Face tensor `name`, which is not of a routed expert.

    If the file has none of the known ways, the result is that of today's files, whose tensors are then missing.
    """
    ways = alternatives(config, name, shape)
    return next((way for way in ways if way.parts[0].name in present), ways[0])


def alternatives(config: Config, name: str, shape: tuple[int, ...]) -> tuple[Held, ...]:
    """The ways in which files hold the Hugging Face tensor `name`, that of today's files first."""
    if name.endswith(".self_attn.kv_b_proj.weight"):
        split = Held(name, shape, _by_head(config, name), values=Values.SPLIT_BY_HEAD)
        return split, Held(name, shape, (Part(_plain(config, name), shape),))
    if name.endswith(".linear_attn.in_proj_qkvz.weight"):
        return _qkvz(config, name, shape)
    part = Part(_plain(config, name), (shape[0], shape[2]) if name.endswith(".conv1d.weight") else shape)
    rows, columns = _orders(config, name, shape)
    return (Held(name, shape, (part,), rows, columns, _values(config, name)),)


def ways_of_linear(config: Config, module: LoraModule) -> tuple[Held, ...]:
    """How files hold the matrix of a linear layer, or those of a layer's experts, that of today's files first. Ways
    that are no rows of matrices are left out, as of MLA's `kv_b_proj` in two parts."""
    shape, name = (module.out_features, module.in_features), f"{module.name}.weight"
    if module.num_experts:
        stored = f"ffn_{module.projection.removesuffix('_proj')}_exps.weight"
        return (Held(name, shape, (Part(f"{expert_prefix(module.layer)}.{stored}", (module.num_experts, *shape)),)),)
    return tuple(way for way in alternatives(config, name, shape) if way.values is Values.SAME)


def _interleaved_heads(config: Config, name: str) -> int:
    """Heads of the Hugging Face tensor `name` whose halves are interleaved in the file; 0: its rows are as they are."""
    if config["model_type"] != "mixtral":
        return 0
    keys = {".self_attn.q_proj.weight": "num_attention_heads", ".self_attn.k_proj.weight": "num_key_value_heads"}
    return next((int(config[key]) for end, key in keys.items() if name.endswith(end)), 0)


def layer_of(name: str) -> int:
    """The layer of a GGUF file's tensor; -1: it is of no layer."""
    match = _LAYER.match(name)
    return -1 if match is None else int(match[1])


def expert_prefix(layer: int) -> str:
    """The prefix of a layer's experts for the native loader (csrc/weights/gguf_layer.h)."""
    return f"blk.{layer}"


def expert_tensors(config: Config) -> dict[str, tuple[int, ...]]:
    """Name after the layer's prefix, and shape, of the tensors of a layer's routed experts."""
    family = family_for(config)
    experts, hidden, intermediate = family.expert_shape(config)
    found: dict[str, tuple[int, ...]] = {}
    for tensor in EXPERT_TENSORS:
        rows, columns = (hidden, intermediate) if tensor == "ffn_down_exps" else (intermediate, hidden)
        found[f"{tensor}.weight"] = (experts, rows, columns)
        if family.expert_mlp(config).has_bias:
            found[f"{tensor}.bias"] = (experts, rows)
    return found


def _plain(config: Config, name: str) -> str:
    """The name of the one tensor that holds `name`."""
    family = family_for(config)
    if name.removesuffix(".weight") in _OF_MODEL:
        return f"{_OF_MODEL[name.removesuffix('.weight')]}.weight"
    layer, _, inner = name.removeprefix("model.layers.").partition(".")
    if (whole := next((part for end, part in _WHOLE.items() if inner.endswith(end)), None)) is not None:
        return f"blk.{layer}.{whole}"
    module, _, kind = inner.rpartition(".")
    if module == "post_attention_layernorm":
        return f"blk.{layer}.{'post_attention_norm' if config['model_type'] in WITH_POST_NORM else 'ffn_norm'}.{kind}"
    if module in _OF_LAYER:
        return f"blk.{layer}.{_OF_LAYER[module]}.{kind}"
    module = module.removeprefix(f"{family.mlp_name}.")
    module = "router" if module == family.router_name else module.replace(f"{family.shared_name}.", "shared.")
    return f"blk.{layer}.{_OF_MLP[module]}.{kind}"


def _values(config: Config, name: str) -> Values:
    if config["model_type"] not in (QWEN3_NEXT, QWEN3_5):
        return Values.SAME
    if name.endswith(".A_log"):
        return Values.DECAY
    return Values.PLUS_ONE if family_for(config).is_offset(name) else Values.SAME


def _by_head(config: Config, name: str) -> tuple[Part, Part]:
    whole = _plain(config, name)
    heads, latent = config["num_attention_heads"], config["kv_lora_rank"]
    return (
        Part(whole.replace("attn_kv_b", "attn_k_b"), (heads, latent, config["qk_nope_head_dim"])),
        Part(whole.replace("attn_kv_b", "attn_v_b"), (heads, config["v_head_dim"], latent)),
    )


def _qkvz(config: Config, name: str, shape: tuple[int, ...]) -> tuple[Held, Held]:
    prefix, hidden = f"blk.{name.split('.')[2]}", shape[1]
    key_heads, value_heads, key, value = _delta_sizes(config)
    of_keys, of_values = key_heads * key, value_heads * value
    parts = (
        Part(f"{prefix}.attn_qkv.weight", (2 * of_keys + of_values, hidden)),
        Part(f"{prefix}.attn_gate.weight", (of_values, hidden)),
    )
    rows = _by_kind(key_heads, (key, key, value_heads // key_heads * value, value_heads // key_heads * value))
    return Held(name, shape, parts, rows), Held(name, shape, (Part(f"{prefix}.ssm_in.weight", shape),))


def _orders(config: Config, name: str, shape: tuple[int, ...]) -> tuple[Order | None, Order | None]:
    """The orders of rows and of columns, as in `Held`."""
    if heads := _interleaved_heads(config, name):
        return _interleaved(heads, shape[0] // heads), None
    if config["model_type"] != QWEN3_5 or ".linear_attn." not in name:
        return None, None
    key_heads, value_heads, key, value = _delta_sizes(config)
    per_key, module = value_heads // key_heads, name.partition(".linear_attn.")[2].removesuffix(".weight")
    if module in ("in_proj_qkv", "conv1d"):
        return _tiled(2 * key_heads * key, key_heads, per_key, value), None
    if module == "in_proj_z":
        return _tiled(0, key_heads, per_key, value), None
    if module in ("in_proj_b", "in_proj_a", "A_log", "dt_bias"):
        return _tiled(0, key_heads, per_key, 1), None
    return None, _tiled(0, key_heads, per_key, value) if module == "out_proj" else None


def _delta_sizes(config: Config) -> tuple[int, int, int, int]:
    """Key heads, value heads, elements of a key, of a value."""
    names = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    key_heads, value_heads, key, value = (int(config[name]) for name in names)
    return key_heads, value_heads, key, value


@cache
def _interleaved(heads: int, size: int) -> Order:
    """In each head the row of the first half, then that of the second half, and so on."""
    half = size // 2
    return tuple(head * size + part * half + row for head in range(heads) for row in range(half) for part in (0, 1))


@cache
def _by_kind(groups: int, sizes: tuple[int, ...]) -> Order:
    """Each group has rows of some kinds, `sizes` of each: first the rows of the first kind, of all groups."""
    starts, whole = [sum(sizes[:kind]) for kind in range(len(sizes))], sum(sizes)
    return tuple(
        chain.from_iterable(
            range(group * whole + start, group * whole + start + size)
            for start, size in zip(starts, sizes, strict=True)
            for group in range(groups)
        )
    )


@cache
def _tiled(before: int, key_heads: int, per_key: int, size: int) -> Order:
    """Behind `before` rows that keep their places: value heads of `size` rows, by number within a key head first."""
    heads = (key * per_key + number for number in range(per_key) for key in range(key_heads))
    moved = (range(before + head * size, before + (head + 1) * size) for head in heads)
    return tuple(chain(range(before), *moved))
