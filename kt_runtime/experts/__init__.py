"""The expert store: routed experts on the CPU, one packed copy for serving and training."""

from __future__ import annotations

from kt_runtime.experts.function import routed_experts, routed_experts_for_backward
from kt_runtime.experts.layer import ExpertGradients, ExpertLayer, ExpertShape, LoraSlot, Retained
from kt_runtime.experts.native import free_spare_memory
from kt_runtime.experts.store import ExpertStore, available_isas

__all__ = [
    "ExpertGradients",
    "ExpertLayer",
    "ExpertShape",
    "ExpertStore",
    "LoraSlot",
    "Retained",
    "available_isas",
    "free_spare_memory",
    "routed_experts",
    "routed_experts_for_backward",
]
