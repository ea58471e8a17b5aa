"""One table of names per model family: the twin's parameters, SGLang's parameters, and the targets of LoRA."""

from kt_runtime.families.base import ATTENTION, EXPERTS, GROUPS, MLP, SHARED, Family, LoraModule, TensorSource
from kt_runtime.families.registry import FAMILIES, family_for
from kt_runtime.families.targets import resolve_targets

__all__ = [
    "ATTENTION",
    "EXPERTS",
    "FAMILIES",
    "GROUPS",
    "MLP",
    "SHARED",
    "Family",
    "LoraModule",
    "TensorSource",
    "family_for",
    "resolve_targets",
]
