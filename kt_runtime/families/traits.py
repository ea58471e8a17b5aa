"""What tells one architecture of experts from another, read from config.json: for models of no known family.

`serve` refuses such a model. The refusal names the family that is nearest, and what differs: whoever adds the family
learns how much there is to do (docs/adding-a-family.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts", "shared_expert_intermediate_size", "moe_num_shared_experts")
LLAMA4 = "interleave_moe_layer_step"
"""A key of Llama 4's configs, in which no other says that its router is a sigmoid and that it has shared experts."""
LATENT, GROUPED_QUERY = "latent (MLA)", "grouped-query"
SIGMOID, SOFTMAX = "sigmoid", "softmax"
LINEAR_ATTENTION, STATE_SPACE, WINDOWS = "linear attention", "state-space layers", "sliding windows"
INDEXER, CLAMP = "an index of the keys that attention reads", "a clamp in the experts"
IMAGES = "inputs other than text"
PARTS = (LINEAR_ATTENTION, STATE_SPACE, WINDOWS, INDEXER, CLAMP, IMAGES)
"""Parts other than attention, router and experts, which few architectures have."""


@dataclass(frozen=True, slots=True)
class Traits:
    attention: str
    router: str
    shared_experts: bool
    dense_first_layers: bool
    parts: frozenset[str] = frozenset()
    """Those of `PARTS` that the architecture has."""


class Known(Protocol):
    """What is read of a `Family`."""

    name: str
    architectures: tuple[str, ...]
    traits: Traits


WORDS = {
    "attention": "its attention is {0}, the family's {1}",
    "router": "its router is a {0}, the family's a {1}",
    "shared_experts": "it has {0} experts, the family {1}",
    "dense_first_layers": "its first layers are {0}, the family's {1}",
}
VALUES: dict[tuple[str, Any], str] = {
    ("shared_experts", True): "shared",
    ("shared_experts", False): "no shared",
    ("dense_first_layers", True): "dense",
    ("dense_first_layers", False): "like the others",
}


def traits_of(config: Mapping[str, Any]) -> Traits | None:
    """None for a model without routed experts."""
    if not any(_number(config, key) > 1 for key in EXPERT_COUNTS):
        return None
    is_llama4 = _number(config, LLAMA4) > 0
    is_sigmoid = is_llama4 or config.get("scoring_func") == "sigmoid" or config.get("topk_method") == "noaux_tc"
    return Traits(
        attention=LATENT if config.get("kv_lora_rank") else GROUPED_QUERY,
        router=SIGMOID if is_sigmoid or config.get("use_routing_bias") else SOFTMAX,
        shared_experts=is_llama4 or any(_number(config, key) > 0 for key in SHARED_EXPERTS),
        dense_first_layers=_number(config, "first_k_dense_replace") > 0,
        parts=frozenset(parts_of(config)),
    )


def parts_of(config: Mapping[str, Any]) -> dict[str, str]:
    """The `PARTS` of a config.json, each with the key that says so."""
    layer_types = config.get("layer_types")
    kinds = set(layer_types) if isinstance(layer_types, list) else set()
    windows = config.get("sliding_window") and config.get("use_sliding_window") is not False and not kinds
    found = {
        (LINEAR_ATTENTION, "layer_types"): "linear_attention" in kinds,
        (LINEAR_ATTENTION, "linear_num_key_heads"): _number(config, "linear_num_key_heads") > 0 and not kinds,
        (STATE_SPACE, "layer_types"): "mamba" in kinds,
        (WINDOWS, "layer_types"): "sliding_attention" in kinds,
        (WINDOWS, "sliding_window"): bool(windows),
        (INDEXER, "index_topk"): bool(config.get("index_topk")),
        (CLAMP, "swiglu_limit"): bool(config.get("swiglu_limit")),
        (IMAGES, "vision_config"): bool(config.get("vision_config")),
    }
    return {part: key for (part, key), is_there in found.items() if is_there}


def nearest(config: Mapping[str, Any], families: Iterable[Known]) -> str:
    """A sentence about the nearest family and what differs from it; for a model without experts, that it has none."""
    inner = config.get("text_config")
    whole = {**config, **inner} if isinstance(inner, Mapping) else dict(config)
    traits = traits_of(whole)
    if traits is None:
        return "it has no routed experts" if whole.get("num_hidden_layers") else ""
    parts = parts_of(whole)
    family = min(families, key=lambda one: len(_differences(traits, parts, one.traits)))
    told = "; ".join(_differences(traits, parts, family.traits))
    told = told or "config.json shows no difference: its names and operations have to be compared"
    return f"nearest is {family.name} ({family.architectures[0]}): {told}"


def _differences(found: Traits, parts: Mapping[str, str], known: Traits) -> list[str]:
    told = []
    for name, words in WORDS.items():
        theirs, ours = getattr(found, name), getattr(known, name)
        if theirs != ours:
            told.append(words.format(*(VALUES.get((name, value), str(value)) for value in (theirs, ours))))
    told += [f"it has {part} ({key!r})" for part, key in parts.items() if part not in known.parts]
    return told + [f"the family has {part}, and it has not" for part in PARTS if part in known.parts - parts.keys()]


def _number(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
