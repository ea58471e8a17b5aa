"""The memory of the ring of experts: on the device, and as much pinned memory of the host."""

from __future__ import annotations

from kt_runtime.experts.values import ExpertShape

NUM_SLOTS = 2
BYTES_PER_WEIGHT = 2  # bfloat16
MOST_CHUNK_EXPERTS = 16
LEAST_COPY_BYTES = 32 << 20
"""A copy as long as this reaches the full speed of the bus, so that larger chunks gain nothing."""


def expert_bytes(shape: ExpertShape) -> int:
    """Bytes of one expert's gate, up and down in bfloat16."""
    return 3 * shape.hidden * shape.intermediate * BYTES_PER_WEIGHT


def ring_bytes(shape: ExpertShape, chunk_experts: int) -> int:
    """Bytes of the ring's slots on the device. The ring's pinned memory has the same size."""
    return NUM_SLOTS * chunk_experts * expert_bytes(shape)


def ring_chunk_experts(shape: ExpertShape, available_bytes: int | None = None) -> int:
    """Experts of a chunk, for a ring of at most `available_bytes`; None: as many as copies at full speed need.

    0: not even a ring with chunks of one expert fits.
    """
    wanted = max(1, -(-LEAST_COPY_BYTES // expert_bytes(shape)))
    wanted = min(wanted, MOST_CHUNK_EXPERTS, shape.num_experts)
    if available_bytes is None:
        return wanted
    return min(wanted, available_bytes // ring_bytes(shape, 1))


def streaming_bytes(shape: ExpertShape, tokens: int, top_k: int, activation_bytes: int, *, trains: bool = False) -> int:
    """Most bytes that the tensors of a streamed call take on the device in addition to the ring.

    The pairs' outputs, the float32 sum, and the rows of the fullest chunk, which may be all pairs. `activation_bytes`:
    of an element of x. `trains`: also with the activations that backward needs, and its gradients.
    """
    pairs = tokens * top_k
    of_pair = activation_bytes * 2 * shape.hidden + 4 * (5 * shape.intermediate + shape.hidden)
    if trains:
        of_pair += 4 * (6 * shape.intermediate + 2 * shape.hidden)
    return pairs * of_pair + 4 * tokens * shape.hidden
