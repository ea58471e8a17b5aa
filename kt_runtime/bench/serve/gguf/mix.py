"""Which type llama.cpp's quantizer gives each matrix of a file: Q8_0, Q4_K_M and MXFP4_MOE.

Q8_0 is one type for all. MXFP4_MOE has MXFP4 for the experts, as gpt-oss is published, and Q8_0 for the others.
Q4_K_M has Q6_K for the head, and for `attn_v` and `ffn_down` of some layers: the first and last eighth, and every third
between. Models of eight experts have better types for keys, values and the attention's output, which are small there.
Where rows are no whole blocks of 256, another type with about as many bits takes the place. Source: llama.cpp,
src/llama-quant.cpp, `llama_tensor_get_type_impl` and `tensor_type_fallback`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kt_runtime.errors import UnknownNameError
from kt_runtime.families import family_for
from kt_runtime.families.base import integer
from kt_runtime.gguf_file import BLOCKS

NO_MIX = "BF16"
FILE_TYPES: Mapping[str, str] = {
    NO_MIX: "MOSTLY_BF16",
    "Q8_0": "MOSTLY_Q8_0",
    "Q4_K_M": "MOSTLY_Q4_K_M",
    "MXFP4_MOE": "MOSTLY_MXFP4_MOE",
}
"""Mix -> the file type's name in the `gguf` package."""
MIXES = tuple(name for name in FILE_TYPES if name != NO_MIX)

_LAYER = re.compile(r"blk\.(\d+)\.")
_NARROW = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}  # for rows that are no whole blocks
_EIGHT_EXPERTS = {"attn_k.weight": "Q8_0", "attn_v.weight": "Q8_0", "attn_output.weight": "Q5_K"}


def check_mix(mix: str) -> None:
    """Raises UnknownNameError for what is no mix of quantized types."""
    if mix not in MIXES:
        raise UnknownNameError("mix of a GGUF file", mix, MIXES)


def type_of(mix: str, name: str, shape: tuple[int, ...], config: Mapping[str, Any]) -> str:
    """The type of the matrix `name` of a GGUF file in `mix`, which is not the router's.

    Raises UnknownNameError for another mix.
    """
    if mix == NO_MIX:
        return NO_MIX
    check_mix(mix)
    if mix == "MXFP4_MOE":
        kind = "MXFP4" if len(shape) == 3 else "Q8_0"
    else:
        kind = "Q8_0" if mix == "Q8_0" else _q4_k_m(name, config)
    return kind if shape[-1] % BLOCKS[kind][0] == 0 else _narrow(kind, shape[-1])


def _narrow(kind: str, columns: int) -> str:
    narrow = _NARROW.get(kind, kind)
    return narrow if columns % BLOCKS[narrow][0] == 0 else NO_MIX


def _q4_k_m(name: str, config: Mapping[str, Any]) -> str:
    is_tied = bool(config.get("tie_word_embeddings"))
    if name == "output.weight" or (is_tied and name == "token_embd.weight"):
        return "Q6_K"
    if (found := _LAYER.match(name)) is None:
        return "Q4_K"
    inner = name[found.end() :]
    if family_for(config).num_experts(config) == 8 and inner in _EIGHT_EXPERTS:
        return _EIGHT_EXPERTS[inner]
    if inner == "attn_v.weight" or inner.startswith("ffn_down"):
        return "Q6_K" if _has_more_bits(int(found[1]), integer(config, "num_hidden_layers")) else "Q4_K"
    return "Q4_K"


def _has_more_bits(layer: int, layers: int) -> bool:
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
