"""Resolves a user's list of LoRA targets for a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kt_runtime.errors import InvalidValueError, UnknownNameError
from kt_runtime.families.base import GROUPS, Config, LoraModule
from kt_runtime.families.registry import family_for

ALL = "all"
NEVER_ADAPTED = ("lm_head", "embed_tokens", "gate", "router", "sinks", "e_score_correction_bias")
PROJECTIONS = (
    *("q_proj", "k_proj", "v_proj", "o_proj"),
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
    *("in_proj_qkvz", "in_proj_qkv", "in_proj_z", "in_proj_ba", "in_proj_b", "in_proj_a", "out_proj"),
    *("gate_proj", "up_proj", "down_proj"),
)


def resolve_targets(config: Config, targets: Sequence[str]) -> list[LoraModule]:
    """The modules that `targets` select, in the order of the model, each once.

    A target is a projection ("q_proj"; "gate_proj" means dense, shared and routed experts alike, as in SGLang), a
    group ("attention", "mlp" for dense MLPs, "shared", "experts"), or "all". Raises UnknownNameError for a name that no
    family knows; InvalidValueError for an empty list, for router, embeddings and lm_head, and for a name that matches
    no module of this model.
    """
    if not targets:
        raise InvalidValueError(f"no LoRA targets; name some of: {', '.join((ALL, *GROUPS, *PROJECTIONS))}")
    modules = family_for(config).lora_modules(config)
    chosen: set[str] = set()
    for target in targets:
        chosen.update(module.name for module in _matching(config, modules, target))
    return [module for module in modules if module.name in chosen]


def _matching(config: Config, modules: Iterable[LoraModule], target: str) -> list[LoraModule]:
    if target in NEVER_ADAPTED:
        raise InvalidValueError(f"LoRA target {target!r}: router, embeddings and lm_head are never adapted")
    if target not in (ALL, *GROUPS, *PROJECTIONS):
        raise UnknownNameError("LoRA target", target, (ALL, *GROUPS, *PROJECTIONS))
    found = [module for module in modules if target in (ALL, module.group, module.projection)]
    if not found:
        names = list(dict.fromkeys([module.group for module in modules] + [module.projection for module in modules]))
        raise InvalidValueError(
            f"LoRA target {target!r} matches nothing that can be adapted in this {family_for(config).name} model; "
            f"it has: {', '.join((ALL, *names))}"
        )
    return found
