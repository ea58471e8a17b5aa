"""The memory need of a server with given options. `serve`, `models show` and the message for a missing preset share
this plan, so that all report the same numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kt_runtime.errors import InvalidValueError
from kt_runtime.families.base import integer
from kt_runtime.families.registry import family_for
from kt_runtime.serve.memory.gpu_experts import hot_scratch_bytes
from kt_runtime.serve.memory.machine import HOST, available_memory, gpu_index, has_gpu, has_graphs
from kt_runtime.serve.memory.plan import (
    TRAINED,
    MemoryPlan,
    ServingShape,
    format_bytes,
    lora_parameters,
    plan_memory,
)
from kt_runtime.serve.options.named import LORA_RANKS, ServeOptions
from kt_runtime.sglang_patch.arguments import GRAPH_PREFILL_TOKENS
from kt_runtime.sglang_patch.delta.states import state_slots
from kt_runtime.sglang_patch.options import last_value

LEAST_MICROBATCH_TOKENS = 128
"""The smallest microbatch that planning chooses; --microbatch-tokens may name a smaller one. With fewer tokens, reading
the experts' weights takes longer than computing with them."""


def serving_shape(options: ServeOptions, *, with_gpu: bool) -> ServingShape:
    """`with_gpu`: attention and dense layers are on a GPU."""
    graph_requests, graph_prefill_tokens = _graphs(options) if with_gpu and has_graphs() else (0, 0)
    return ServingShape(
        device="gpu" if with_gpu else "cpu",
        max_total_tokens=options.max_total_tokens,
        context_tokens=options.context_tokens,
        activation_bytes=4 if options.dtype == "float32" else 2,
        lora_slots=options.lora_slots,
        lora_memory_bytes=None if with_gpu else options.lora_memory_bytes,
        lora_rank=options.max_lora_rank,
        session_memory_bytes=options.session_memory_bytes,
        training_tokens=options.microbatch_tokens,
        expert_format=options.expert_format,
        cache=options.cache,
        route_bytes=options.routing_replay_bytes,
        runs_jobs=options.finetuning_dir != "off" and not options.node_rank,
        gpu_expert_bytes=options.gpu_experts_bytes if with_gpu else 0,
        tokens_option="--max-total-tokens" if options.cache_device_bytes is None else "--cache-device",
        graph_requests=graph_requests,
        graph_prefill_tokens=graph_prefill_tokens,
        state_slots=state_slots(options),
        ranks=options.tp_size // options.nnodes,
        hosts=options.nnodes,
    )


def _graphs(options: ServeOptions) -> tuple[int, int]:
    """(requests of the largest decode graph, tokens of the longest prefill graph), as SGLang is asked to capture."""
    most_tokens = min(GRAPH_PREFILL_TOKENS, options.max_total_tokens)
    largest = {"decode": options.max_running_requests, "prefill": most_tokens}
    for phase in largest:
        if options.no_graphs or last_value(options.passed_on, f"--cuda-graph-backend-{phase}") == "disabled":
            largest[phase] = 0
        elif (given := last_value(options.passed_on, f"--cuda-graph-max-bs-{phase}") or "").isdigit():
            largest[phase] = int(given)
    return largest["decode"], largest["prefill"]


def with_lora_rank(options: ServeOptions, config: Mapping[str, Any], name: str) -> ServeOptions:
    """`options` with the highest of LORA_RANKS for which the model fits, or the lowest if none fits; unchanged if the
    user has set a rank. LoRA slots and a session's optimizer grow with the rank: 0.8 GiB a rank for Qwen3-30B."""
    if not options.lora_rank_may_be_lower:
        return options
    for rank in LORA_RANKS:
        chosen = replace(options, max_lora_rank=rank, lora_rank_may_be_lower=False)
        if _fits(chosen, config, name):
            break
    return chosen


def with_lora_slots(options: ServeOptions, config: Mapping[str, Any]) -> ServeOptions:
    """`options` with the slots that `lora_memory_bytes` asks for; unchanged without.

    On a CPU one for each request that runs, and one for the base: a slot takes the memory of its adapter, and the
    runtime keeps the sum within the budget. A GPU's slots are allocated for the highest rank: as many as fit. Raises
    InvalidValueError if the memory does not hold the base and an adapter.
    """
    if options.lora_memory_bytes is None:
        return options
    if not (has_gpu() and options.device != HOST):
        return replace(options, lora_slots=options.max_running_requests + 1)
    one = replace(serving_shape(options, with_gpu=True), lora_slots=1)
    slot_bytes = lora_parameters(config, one)[0] * one.activation_bytes
    slots = min(options.max_running_requests + 1, options.lora_memory_bytes // slot_bytes)
    if slots < 2:
        raise InvalidValueError(
            f"--lora-memory: {format_bytes(options.lora_memory_bytes)} hold {slots} slots of rank "
            f"{options.max_lora_rank}, of {format_bytes(slot_bytes)} each; the base and one adapter need two"
        )
    return replace(options, lora_slots=slots)


def rank_lora_bytes(options: ServeOptions) -> int | None:
    """Bytes that the adapters in a rank's slots may have: an even part of the host's. None: no limit."""
    ranks = options.tp_size // options.nnodes
    return None if options.lora_memory_bytes is None else options.lora_memory_bytes // ranks


def with_microbatch(options: ServeOptions, config: Mapping[str, Any], name: str) -> ServeOptions:
    """`options` with the largest microbatch that fits: the one asked for, or its half as often as needed.

    Unchanged if not even LEAST_MICROBATCH_TOKENS fit. Activations of training grow with the microbatch.
    """
    chosen = options
    while not _fits(chosen, config, name):
        if (tokens := chosen.microbatch_tokens // 2) < LEAST_MICROBATCH_TOKENS:
            return options
        chosen = replace(chosen, microbatch_tokens=tokens)
    return chosen


def _fits(options: ServeOptions, config: Mapping[str, Any], name: str) -> bool:
    plan, free_bytes = plan_server(options, config, name)
    return all(plan.total_bytes(device) <= free_bytes.get(device, 0) for device in plan.devices())


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
    with_gpu = has_gpu() and options.device != HOST
    shape = serving_shape(options, with_gpu=with_gpu)
    if shape.gpu_expert_bytes:
        shape = replace(shape, gpu_scratch_bytes=hot_scratch_bytes(options, config))
    free_bytes = available_memory(with_gpu, gpu_index(options.device or HOST))
    if with_gpu and options.streaming != "off":
        shape = _with_ring(shape, config, free_bytes.get("gpu", 0), name, is_needed=options.streaming != "auto")
    return plan_memory(config, shape, name), free_bytes


def least_bytes(config: Mapping[str, Any], name: str, *, with_gpu: bool) -> int:
    """Bytes that a server with default options and the lowest of LORA_RANKS needs, on all devices together."""
    options = ServeOptions(model=name, max_lora_rank=LORA_RANKS[-1])
    plan = plan_memory(config, serving_shape(options, with_gpu=with_gpu), name)
    return sum(plan.total_bytes(device) for device in plan.devices())


def _with_ring(
    shape: ServingShape, config: Mapping[str, Any], free_bytes: int, name: str, *, is_needed: bool
) -> ServingShape:
    """`shape` with the largest ring that the GPU holds with all else. Without any room `shape` has no ring,
    or, if one `is_needed`, the smallest."""
    from kt_runtime.experts import ExpertShape  # imports torch
    from kt_runtime.experts.gpu.sizes import ring_bytes, ring_chunk_experts, streaming_bytes

    experts = ExpertShape(*family_for(config).expert_shape(config))
    top_k, trains = integer(config, "num_experts_per_tok"), shape.training_sessions > 0
    tokens, element_bytes = shape.training_tokens, shape.activation_bytes
    streaming = replace(shape, streamed_bytes=streaming_bytes(experts, tokens, top_k, element_bytes, trains=trains))
    left = free_bytes - plan_memory(config, streaming, name).total_bytes("gpu")
    chunk = ring_chunk_experts(experts, max(0, left)) or int(is_needed)
    return replace(streaming, ring_chunk_experts=chunk, ring_bytes=ring_bytes(experts, chunk)) if chunk else shape
