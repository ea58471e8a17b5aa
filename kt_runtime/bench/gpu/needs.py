"""The least that a case needs of each resource of the machine, and what share of the measured time that is.

A resource's share is the time that it alone would need at its limit (`limits`), divided by the measured time. With 0.6
of `dram`, the CPU's memory could have delivered the same in 0.6 of the time. The largest share names the limit.

Counted are: of a decode step every dense matrix once and the KV of all streams from device memory; each distinct routed
expert once, from where it lies (DRAM, device memory, or over the bus into device memory); two operations for a
multiply-add. Activations, the adapter's matrices and small vectors are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from kt_runtime.bench.gpu.limits import GpuLimits
from kt_runtime.bench.serve.work import ModelWork

BF16_BYTES = 2
TRAINING_PASSES = 2
"""Forward, and the gradient of the activations: frozen matrices get no gradient of their own."""

Experts = Literal["cpu", "streamed", "paged", "device"]
"""Who computes routed experts that are not resident on the device. "cpu": the CPU. "streamed": the device, each layer's
experts are unpacked to bf16 and copied there (kt-runtime's ring). "paged": the device, each missing expert is copied
there (SGLang). "device": all experts are resident."""


@dataclass(frozen=True)
class Needs:
    """Bytes, and operations for the two arithmetics; the names are those of GpuLimits."""

    dram: float = 0.0
    cpu_arithmetic: float = 0.0
    to_device: float = 0.0
    device_memory: float = 0.0
    device_arithmetic: float = 0.0

    def times(self, factor: float) -> Needs:
        return Needs(**{each.name: factor * getattr(self, each.name) for each in fields(self)})

    def shares(self, limits: GpuLimits, seconds: float) -> dict[str, float]:
        """`seconds`: measured. Resources of which nothing is needed are left out."""
        needed = {each.name: getattr(self, each.name) / getattr(limits, each.name) for each in fields(self)}
        return {name: least / seconds for name, least in needed.items() if least > 0}


@dataclass(frozen=True)
class ExpertPlace:
    """`resident`: experts of each layer on the device. `hit_rate`: share of a token's experts that are among them, as
    the server counted; None: in proportion, as random routing hits."""

    experts: Experts
    resident: int = 0
    hit_rate: float | None = None

    def hit_share(self, work: ModelWork) -> float:
        if self.hit_rate is not None:
            return self.hit_rate
        return 1.0 if self.experts == "device" else min(1.0, self.resident / work.num_experts)


def decode_needs(work: ModelWork, place: ExpertPlace, streams: int, context: float) -> Needs:
    """What one step needs. `context`: mean number of cached tokens of a stream. Routing counts as random."""
    distinct = work.moe_layers * work.expected_experts(streams)
    dense = (work.dense_parameters + work.head_parameters) * work.dtype_bytes + streams * context * work.kv_token_bytes
    operations = 2.0 * streams * (work.dense_parameters + work.head_parameters)
    operations += streams * context * work.absorbed_pair_ops
    pairs = streams * work.moe_layers * work.top_k
    return _with_experts(work, place, distinct, pairs, dense, operations)


def prefill_needs(work: ModelWork, place: ExpertPlace, tokens: int) -> Needs:
    """What one prompt needs, computed from its start, with the answer's first token."""
    distinct = work.moe_layers * work.expected_experts(tokens)
    dense = (work.dense_parameters + work.head_parameters) * float(work.dtype_bytes)
    operations = 2.0 * (tokens * work.dense_parameters + work.head_parameters)
    operations += tokens * (tokens + 1) / 2 * work.expanded_pair_ops
    return _with_experts(work, place, distinct, tokens * work.moe_layers * work.top_k, dense, operations)


def training_needs(work: ModelWork, place: ExpertPlace, sequences: int, tokens: int) -> Needs:
    """What a step of `sequences` x `tokens` needs: forward and backward, with the head for every token. Each expert is
    read once a pass."""
    count = sequences * tokens
    distinct = work.moe_layers * work.expected_experts(count)
    dense = (work.dense_parameters + work.head_parameters) * float(work.dtype_bytes)
    operations = 2.0 * count * (work.dense_parameters + work.head_parameters)
    operations += sequences * tokens * (tokens + 1) / 2 * work.expanded_pair_ops
    one = _with_experts(work, place, distinct, count * work.moe_layers * work.top_k, dense, operations)
    return one.times(TRAINING_PASSES)


def _with_experts(
    work: ModelWork, place: ExpertPlace, distinct: float, pairs: float, dense_bytes: float, dense_operations: float
) -> Needs:
    """`distinct`: experts of all layers. `pairs`: of a token and one of its experts, in all layers."""
    hits = place.hit_share(work)
    expert_operations = 2.0 * pairs * work.expert_parameters
    on_device = float(BF16_BYTES * work.expert_parameters)
    packed, misses = work.expert_bytes * (1 - hits) * distinct, on_device * (1 - hits) * distinct
    resident = Needs(
        device_memory=dense_bytes + hits * distinct * on_device,
        device_arithmetic=dense_operations + hits * expert_operations,
    )
    missed: dict[str, Any] = {
        "cpu": {"dram": packed, "cpu_arithmetic": (1 - hits) * expert_operations},
        "streamed": {"dram": packed, "to_device": misses},
        "paged": {"to_device": misses},
        "device": {},
    }[place.experts]
    if place.experts in ("streamed", "paged"):
        return Needs(
            **missed,
            device_memory=resident.device_memory + misses,
            device_arithmetic=dense_operations + expert_operations,
        )
    return Needs(**missed, device_memory=resident.device_memory, device_arithmetic=resident.device_arithmetic)
