"""The expert store: routed experts on the CPU, one packed copy for serving and training."""

from __future__ import annotations

from kt_runtime.experts.function import routed_experts, routed_experts_for_backward
from kt_runtime.experts.layer import ExpertLayer
from kt_runtime.experts.native import free_spare_memory
from kt_runtime.experts.store import ExpertStore, available_isas
from kt_runtime.experts.values import ExpertGradients, ExpertShape, LoraSlot, Retained

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
