"""What tells one architecture of experts from another, read from config.json: for models of no known family.

`serve` refuses such a model. The refusal names the family that is nearest, and what differs: whoever adds the family
learns how much there is to do (docs/adding-a-family.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts", "shared_expert_intermediate_size", "moe_num_shared_experts")
LLAMA4 = "interleave_moe_layer_step"
"""A key of Llama 4's configs, in which no other says that its router is a sigmoid and that it has shared experts."""
LATENT, GROUPED_QUERY = "latent (MLA)", "grouped-query"
SIGMOID, SOFTMAX = "sigmoid", "softmax"


@dataclass(frozen=True, slots=True)
class Traits:
    attention: str
    router: str
    shared_experts: bool
    dense_first_layers: bool


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
    )


def foreign_parts(config: Mapping[str, Any]) -> list[str]:
    """What no family has, each with the key of config.json that says so."""
    layer_types = config.get("layer_types")
    kinds = set(layer_types) if isinstance(layer_types, list) else set()
    found = {
        "linear attention ('layer_types')": bool(kinds & {"linear_attention", "mamba"}),
        "sliding windows ('layer_types')": bool(kinds & {"sliding_attention"}),
        "sliding windows ('sliding_window')": bool(config.get("sliding_window"))
        and config.get("use_sliding_window") is not False
        and not kinds,
        "an index of the keys that attention reads ('index_topk')": bool(config.get("index_topk")),
        "a clamp in the experts ('swiglu_limit')": bool(config.get("swiglu_limit")),
        "inputs other than text ('vision_config')": bool(config.get("vision_config")),
    }
    return [what for what, is_there in found.items() if is_there]


def nearest(config: Mapping[str, Any], families: Iterable[Known]) -> str:
    """A sentence about the nearest family and what differs from it; for a model without experts, that it has none."""
    inner = config.get("text_config")
    whole = {**config, **inner} if isinstance(inner, Mapping) else dict(config)
    traits = traits_of(whole)
    if traits is None:
        return "it has no routed experts" if whole.get("num_hidden_layers") else ""
    family = min(families, key=lambda one: len(_differences(traits, one.traits)))
    differences = [*_differences(traits, family.traits), *(f"it has {part}" for part in foreign_parts(whole))]
    told = "; ".join(differences) or "config.json shows no difference: its names and operations have to be compared"
    return f"nearest is {family.name} ({family.architectures[0]}): {told}"


def _differences(found: Traits, known: Traits) -> list[str]:
    told = []
    for field in fields(Traits):
        theirs, ours = getattr(found, field.name), getattr(known, field.name)
        if theirs != ours:
            words = (VALUES.get((field.name, value), str(value)) for value in (theirs, ours))
            told.append(WORDS[field.name].format(*words))
    return told


def _number(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
