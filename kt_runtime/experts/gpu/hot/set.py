"""The hot experts of all layers: what a size has room for, and the moves between two steps.

A move has two phases, so that no step computes with weights that are still being copied. First the expert is unpacked
into a pinned buffer, and a copy into its slot is queued in a lane of its own; if another expert had the slot, the store
computes that one from now on. In a later turn, when the copy has ended, the table shows the new expert. Serving goes on
meanwhile.

A turn unpacks at most MOST_BYTES_PER_TURN, and one expert at least: unpacking takes the engine's time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from kt_runtime import device as devices
from kt_runtime.errors import InvalidValueError
from kt_runtime.experts.gpu.hot.lanes import Lane, Mark
from kt_runtime.experts.gpu.hot.layer import HotExperts, Step, expert_bytes
from kt_runtime.experts.gpu.hot.placement import Move, Placement, Policy, slots_by_layer
from kt_runtime.experts.gpu.paths import DevicePaths
from kt_runtime.experts.layer import ExpertLayer
from kt_runtime.experts.values import ExpertShape

NUM_CARRIERS = 2
MOST_BYTES_PER_TURN = 32 << 20


@dataclass(frozen=True)
class LayerUse:
    """`hits`, `misses`: pairs (token, expert) of decode steps that the device and the store computed, since the start.

    `resident`: experts whose weights are on the device, ascending.
    """

    layer: int
    slots: int
    resident: list[int]
    hits: int
    misses: int


@dataclass(frozen=True)
class HotUse:
    """`size_bytes`: slots and pinned buffers. `pinned`: experts that never leave. `moves`, `moved_bytes`: copies begun
    since the start."""

    size_bytes: int
    slot_bytes: int
    pinned: int
    moves: int
    moved_bytes: int
    decode_steps: int
    layers: list[LayerUse]


def slots_within(size_bytes: int, shape: ExpertShape, dtype: torch.dtype) -> int:
    """How many slots fit into `size_bytes` beside the pinned buffers. Raises InvalidValueError if not one does."""
    each = expert_bytes(shape, dtype)
    slots = size_bytes // each - NUM_CARRIERS
    if slots < 1:
        raise InvalidValueError(
            f"--gpu-experts {size_bytes}: has no room for one expert; allowed: {(NUM_CARRIERS + 1) * each} bytes or "
            f"more (an expert has {each}, and {NUM_CARRIERS} buffers carry experts to the device)"
        )
    return slots


class _Carrier:
    """A pinned buffer of one expert's weights and what it carries now."""

    def __init__(self, shape: ExpertShape, dtype: torch.dtype) -> None:
        inner, hidden = shape.intermediate, shape.hidden
        buffer = devices.pinned(expert_bytes(shape, dtype)).view(dtype)
        self.w13 = buffer[: 2 * inner * hidden].view(1, 2 * inner, hidden)
        self.w2 = buffer[2 * inner * hidden :].view(1, hidden, inner)
        self.load: tuple[Move, Mark] | None = None


class HotSet:
    """`layers`: the store's, by the model's index. `dtype`: the model's. `where`: the device of attention.

    `size_bytes`: of all slots and pinned buffers together, never exceeded. `pins`: layer -> experts that never leave.
    Raises InvalidValueError if the size has no room for one expert, or none for the pinned ones.
    The engine's thread makes all calls.
    """

    def __init__(
        self,
        layers: Mapping[int, ExpertLayer],
        shape: ExpertShape,
        dtype: torch.dtype,
        where: torch.device,
        size_bytes: int,
        pins: Mapping[int, Sequence[int]] | None = None,
        policy: Policy | None = None,
    ) -> None:
        pins = pins or {}
        slots = slots_by_layer(list(layers), shape.num_experts, slots_within(size_bytes, shape, dtype), pins)
        self.step_state = Step()
        self._store = dict(layers)
        self._pinned = sum(map(len, pins.values()))
        self._slot_bytes = expert_bytes(shape, dtype)
        lanes = Lane(where), Lane(where)
        self.layers = {
            layer: HotExperts(shape, count, dtype, where, lanes, self.step_state)
            for layer, count in slots.items()
            if count
        }
        used = {layer: slots[layer] for layer in self.layers}
        self.placement = Placement(shape.num_experts, used, pins, policy)
        self._carriers = [_Carrier(shape, dtype) for _ in range(NUM_CARRIERS)]
        self._steps = self._all_steps = self._moves = 0

    def attach(self) -> None:
        """From now on calls of the store's layers with tensors of the device come here."""
        for layer, hot in self.layers.items():
            store = self._store[layer]
            store.device_paths = replace(store.device_paths or DevicePaths(), hot=hot)

    @property
    def size_bytes(self) -> int:
        """Bytes of the slots and the pinned buffers."""
        return self._slot_bytes * (NUM_CARRIERS + sum(layer.num_slots for layer in self.layers.values()))

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
        """Between two steps: shows experts that have arrived, and sends others on their way."""
        self._check_between_steps()
        self._count()
        for carrier in self._carriers:
            self._admit(carrier)
        idle = [carrier for carrier in self._carriers if carrier.load is None]
        most = max(1, MOST_BYTES_PER_TURN // self._slot_bytes)
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
            LayerUse(layer, hot.num_slots, sorted(self.placement.resident(layer)), hot.uses.hits, hot.uses.misses)
            for layer, hot in self.layers.items()
        ]
        steps = self._all_steps + self._steps
        moved_bytes = self._moves * self._slot_bytes
        return HotUse(self.size_bytes, self._slot_bytes, self._pinned, self._moves, moved_bytes, steps, layers)

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
        _unpack(self._store[move.layer], move.expert, carrier)
        carrier.load = move, hot.fill(move.slot, carrier.w13[0], carrier.w2[0])
        self._moves += 1


def _unpack(layer: ExpertLayer, expert: int, carrier: _Carrier) -> None:
    """Each weight is rounded once to the carrier's dtype."""
    if carrier.w13.dtype == torch.bfloat16:
        layer.unpack_range(expert, 1, carrier.w13, carrier.w2)
        return
    gate, up, down = layer.unpacked(expert)
    inner = gate.shape[0]
    carrier.w13[0, :inner].copy_(gate)
    carrier.w13[0, inner:].copy_(up)
    carrier.w2[0].copy_(down)
