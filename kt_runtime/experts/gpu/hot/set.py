"""The hot experts of all layers: what a size has room for, and the moves between two steps.

A move has two phases, so that no step computes with weights that are still being copied. First the expert is unpacked
into a pinned buffer, and a copy into its slot is queued in a lane of its own; if another expert had the slot, the store
computes that one from now on. In a later turn, when the copy has ended, the table shows the new expert. Serving
continues meanwhile.

A turn starts copies of at most MOST_BYTES_PER_TURN, but of at least one expert: unpacking takes the engine's time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from kt_runtime import device as devices
from kt_runtime.errors import InvalidValueError
from kt_runtime.experts.gpu.hot.lanes import Lane, Mark
from kt_runtime.experts.gpu.hot.layer import HotExperts, Step
from kt_runtime.experts.gpu.hot.placement import Move, Placement, Policy, slots_by_layer
from kt_runtime.experts.gpu.hot.slots import (
    CarriedLayer,
    Form,
    PackedSlots,
    PlainSlots,
    Scratch,
    scratch_bytes,
    slot_bytes,
)
from kt_runtime.experts.gpu.paths import DevicePaths
from kt_runtime.experts.values import ExpertShape

NUM_CARRIERS = 2
MOST_BYTES_PER_TURN = 32 << 20


@dataclass(frozen=True)
class LayerUse:
    """`hits`, `misses`: pairs (token, expert) of decode steps that the device and the store computed, since the start.

    `resident`: experts whose weights are on the device, ascending. `format`: in which they are held: "int4_g32", or the
    model's dtype. `slot_bytes`: of one slot.
    """

    layer: int
    slots: int
    resident: list[int]
    hits: int
    misses: int
    format: str
    slot_bytes: int


@dataclass(frozen=True)
class HotUse:
    """`size_bytes`: slots and pinned buffers. `scratch_bytes`: memory for dequantized weights, not part of the size.
    `pinned`: number of experts that never leave. `moves`, `moved_bytes`: copies begun since the start."""

    form: Form
    size_bytes: int
    scratch_bytes: int
    pinned: int
    moves: int
    moved_bytes: int
    decode_steps: int
    layers: list[LayerUse]


def slots_within(
    size_bytes: int, slot_sizes: Mapping[int, int], num_experts: int, pins: Mapping[int, Sequence[int]]
) -> dict[int, int]:
    """Layer -> slots that fit into `size_bytes` together with the pinned buffers, which hold the largest expert each.

    `slot_sizes`: layer -> bytes of a slot. Raises InvalidValueError if not one slot fits, or too few for the pinned
    experts.
    """
    largest, smallest = max(slot_sizes.values()), min(slot_sizes.values())
    least = NUM_CARRIERS * largest + smallest
    if size_bytes < least:
        raise InvalidValueError(
            f"--gpu-experts {size_bytes}: has no room for one expert; allowed: {least} bytes or more (an expert has "
            f"{smallest}, and {NUM_CARRIERS} buffers of {largest} carry experts to the device)"
        )
    return slots_by_layer(slot_sizes, num_experts, size_bytes - NUM_CARRIERS * largest, pins)


class _Carrier:
    """A pinned buffer of one expert's weights and what it carries now."""

    def __init__(self, num_bytes: int) -> None:
        self.buffer = devices.pinned(num_bytes)
        self.load: tuple[Move, Mark] | None = None


class StoredLayer(CarriedLayer, Protocol):
    """An `ExpertLayer`, which gets its hot experts."""

    device_paths: DevicePaths | None


class HotSet:
    """`layers`: the store's, by the model's index. `dtype`: the model's. `where`: the device of attention.

    `size_bytes`: of all slots and pinned buffers together, never exceeded. `pins`: layer -> experts that never leave.
    `form`: how slots hold an expert. Published ones need a scratch in addition to the size (`slots.scratch_bytes`).
    Raises InvalidValueError if the size has no room for one expert, or none for the pinned ones, and for a published
    format that can't be dequantized on the device. The engine's thread makes all calls.
    """

    def __init__(
        self,
        layers: Mapping[int, StoredLayer],
        shape: ExpertShape,
        dtype: torch.dtype,
        where: torch.device,
        size_bytes: int,
        pins: Mapping[int, Sequence[int]] | None = None,
        policy: Policy | None = None,
        form: Form = "model",
    ) -> None:
        pins = pins or {}
        sizes = slot_bytes(shape, dtype, form, {index: layer.format for index, layer in layers.items()})
        counts = {
            index: count for index, count in slots_within(size_bytes, sizes, shape.num_experts, pins).items() if count
        }
        self.step_state = Step()
        self._store, self._form = dict(layers), form
        self._pinned = sum(map(len, pins.values()))
        self._carriers = [_Carrier(max(sizes.values())) for _ in range(NUM_CARRIERS)]
        self._scratch_bytes = scratch_bytes(shape, dtype) if form == "published" else 0
        with torch.inference_mode(False):  # a tensor made in inference mode could not be changed outside of it
            slots = _made_slots(counts, layers, shape, dtype, where, form)
        lanes = Lane(where), Lane(where)
        self.layers = {index: HotExperts(shape, slots[index], lanes, self.step_state) for index in counts}
        self.placement = Placement(shape.num_experts, counts, pins, policy)
        self._steps = self._all_steps = self._moves = self._moved_bytes = 0

    def attach(self) -> None:
        """From now on calls of the store's layers with tensors of the device come here."""
        for layer, hot in self.layers.items():
            store = self._store[layer]
            store.device_paths = replace(store.device_paths or DevicePaths(), hot=hot)

    @property
    def size_bytes(self) -> int:
        """Bytes of the slots and the pinned buffers."""
        of_slots = sum(hot.num_slots * hot.slots.expert_bytes for hot in self.layers.values())
        return of_slots + sum(carrier.buffer.numel() for carrier in self._carriers)

    @contextmanager
    def step(self, *, decoded_tokens: int) -> Iterator[None]:
        """The engine computes one batch of requests inside. `decoded_tokens`: of the batch if it decodes, without
        padding; 0: it does not.

        Outside, and so in training, the store computes everything.
        """
        state = self.step_state
        state.is_serving, state.counted_tokens = True, decoded_tokens
        try:
            yield
        finally:
            state.is_serving, state.counted_tokens = False, 0
            self._steps += decoded_tokens > 0

    def turn(self) -> None:
        """Called between two steps: puts experts whose copies have ended into use, and starts copies of others."""
        self._check_between_steps()
        self._count()
        for carrier in self._carriers:
            self._admit(carrier)
        idle = [carrier for carrier in self._carriers if carrier.load is None]
        most = max(1, MOST_BYTES_PER_TURN // self._carriers[0].buffer.numel())
        for carrier, move in zip(idle, self.placement.moves(min(most, len(idle))), strict=False):
            self._send(carrier, move)

    def settle(self) -> None:
        """Makes all moves that are due, and waits for their copies: a server starts with its pinned experts there."""
        self.turn()
        while self.is_moving():
            for carrier in self._carriers:
                if carrier.load is not None:
                    carrier.load[1].synchronize()
            self.turn()

    def is_moving(self) -> bool:
        """Whether an expert is being copied: `turn` has to be called although no request is running."""
        return any(carrier.load is not None for carrier in self._carriers)

    def use(self) -> HotUse:
        layers = [
            LayerUse(
                layer,
                hot.num_slots,
                sorted(self.placement.resident(layer)),
                hot.uses.hits,
                hot.uses.misses,
                hot.slots.format,
                hot.slots.expert_bytes,
            )
            for layer, hot in self.layers.items()
        ]
        return HotUse(
            form=self._form,
            size_bytes=self.size_bytes,
            scratch_bytes=self._scratch_bytes,
            pinned=self._pinned,
            moves=self._moves,
            moved_bytes=self._moved_bytes,
            decode_steps=self._all_steps + self._steps,
            layers=layers,
        )

    def _check_between_steps(self) -> None:
        assert not self.step_state.is_serving, "experts move between two steps only"

    def _count(self) -> None:
        if not self._steps:
            return
        self.placement.decay(self._steps)
        for layer, hot in self.layers.items():
            self.placement.count(layer, hot.uses.take())
        self._all_steps, self._steps = self._all_steps + self._steps, 0

    def _admit(self, carrier: _Carrier) -> None:
        if carrier.load is None:
            return
        move, filled = carrier.load
        if filled.query():
            self.layers[move.layer].admit(move.expert, move.slot, filled)
            self.placement.arrived(move)
            carrier.load = None

    def _send(self, carrier: _Carrier, move: Move) -> None:
        hot = self.layers[move.layer]
        if move.evicted is not None:
            hot.evict(move.evicted)
        buffer = carrier.buffer[: hot.slots.expert_bytes]
        hot.slots.carry(self._store[move.layer], move.expert, buffer)
        carrier.load = move, hot.fill(move.slot, buffer)
        self._moves += 1
        self._moved_bytes += buffer.numel()


def _made_slots(
    counts: Mapping[int, int],
    layers: Mapping[int, StoredLayer],
    shape: ExpertShape,
    dtype: torch.dtype,
    where: torch.device,
    form: Form,
) -> dict[int, PlainSlots | PackedSlots]:
    """Layer -> its slots; all packed ones share a scratch."""
    if form == "model":
        return {index: PlainSlots(shape, count, dtype, where) for index, count in counts.items()}
    scratch = Scratch(shape, dtype, where)
    return {index: PackedSlots(shape, count, layers[index].format, scratch) for index, count in counts.items()}
