"""The memory need of a server with given options. `serve`, `models show` and the message for a missing preset share
this plan, so that all report the same numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kt_runtime.serve.memory.machine import available_memory, has_gpu
from kt_runtime.serve.memory.plan import TRAINED, MemoryPlan, ServingShape, plan_memory
from kt_runtime.serve.options.named import LORA_RANKS, ServeOptions


def serving_shape(options: ServeOptions, *, with_gpu: bool) -> ServingShape:
    """`with_gpu`: attention and dense layers are on a GPU."""
    return ServingShape(
        device="gpu" if with_gpu else "cpu",
        max_total_tokens=options.max_total_tokens,
        activation_bytes=4 if options.dtype == "float32" else 2,
        lora_slots=options.lora_slots,
        lora_rank=options.max_lora_rank,
        training_tokens=options.microbatch_tokens,
        expert_format=options.expert_format,
        cache=options.cache,
        tokens_option="--max-total-tokens" if options.cache_device_bytes is None else "--cache-device",
    )


def with_lora_rank(options: ServeOptions, config: Mapping[str, Any], name: str) -> ServeOptions:
    """`options` with the highest of LORA_RANKS for which the model fits, or the lowest if none fits; unchanged if the
    user has set a rank. LoRA slots and a session's optimizer grow with the rank: 0.8 GiB a rank for Qwen3-30B."""
    if not options.lora_rank_may_be_lower:
        return options
    for rank in LORA_RANKS:
        chosen = replace(options, max_lora_rank=rank, lora_rank_may_be_lower=False)
        plan, free_bytes = plan_server(chosen, config, name)
        if all(plan.total_bytes(device) <= free_bytes.get(device, 0) for device in plan.devices()):
            break
    return chosen


def session_memory_bytes(plan: MemoryPlan, available: Mapping[str, int]) -> int:
    """The default memory limit of all training sessions: their part of the plan, and half of the unplanned memory."""
    planned = next((need for need in plan.needs if need.what == TRAINED), None)
    if planned is None:
        return 1 << 20
    left = available.get(planned.device, 0) - plan.total_bytes(planned.device)
    return planned.size_bytes + max(0, left) // 2


def plan_server(options: ServeOptions, config: Mapping[str, Any], name: str) -> tuple[MemoryPlan, Mapping[str, int]]:
    """(the memory need of the model `name` with these options, this machine's free bytes by device).

    Raises the errors of `plan_memory`.
    """
    with_gpu = has_gpu()
    return plan_memory(config, serving_shape(options, with_gpu=with_gpu), name), available_memory(with_gpu)
