"""Decides which experts are on the device: takes counts of uses, and returns moves. Knows neither tensors nor devices.

A layer has a fixed number of slots; each holds one expert or none. Uses are counted for each layer and expert, in
decode steps only: the routing of a prompt is nearly flat, so its counts would push out what decoding needs. Counts
decay by half in `half_life_steps` steps. A free slot goes to the most used expert that is not on the device. A full
layer exchanges its least used expert only for one that is used `margin` times as much (hysteresis): two experts with
about equal counts would otherwise replace each other again and again, and each exchange copies megabytes. Pinned
experts get their slots first and keep them.

One thread calls all methods, between steps, except `count`, which the same thread calls within a step.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kt_runtime.errors import InvalidValueError

NONE = -1  # an expert without a slot, a slot without an expert


@dataclass(frozen=True)
class Policy:
    """`least_count`: decayed uses with which an expert is worth a copy, and the least lead over the one that it
    replaces."""

    half_life_steps: float = 512.0
    margin: float = 1.5
    least_count: float = 4.0

    def __post_init__(self) -> None:
        """Raises InvalidValueError: a margin below 1 would exchange experts for less used ones."""
        for name, value, lowest in (
            ("half_life_steps", self.half_life_steps, 1),
            ("margin", self.margin, 1),
            ("least_count", self.least_count, 0),
        ):
            if not value >= lowest:
                raise InvalidValueError(f"{name} of the placement is {value}; allowed: {lowest} or more")


@dataclass(frozen=True)
class Move:
    """Copy `expert` of `layer` into `slot`. `evicted`: the expert that had the slot; None: it was free."""

    layer: int
    expert: int
    slot: int
    evicted: int | None


def slots_by_layer(
    slot_bytes: Mapping[int, int], num_experts: int, room_bytes: int, pins: Mapping[int, Sequence[int]]
) -> dict[int, int]:
    """Slots of each layer: first its pinned experts', then one by one for the layer with the fewest slots, as long as
    the next one fits.

    `slot_bytes`: layer -> bytes of a slot. All slots together have at most `room_bytes`. Raises InvalidValueError if
    the pinned experts need more.
    """
    slots = {layer: len(pins.get(layer, ())) for layer in slot_bytes}
    left = room_bytes - sum(count * slot_bytes[layer] for layer, count in slots.items())
    if left < 0:
        raise InvalidValueError(
            f"{sum(slots.values())} experts are pinned to the device, which has room for "
            f"{_fitting(slots, slot_bytes, room_bytes)}"
        )
    fewest = [(count, layer) for layer, count in slots.items() if count < num_experts]
    heapq.heapify(fewest)
    while fewest:
        count, layer = heapq.heappop(fewest)
        if slot_bytes[layer] > left:
            continue  # layers of smaller slots may have room
        slots[layer], left = count + 1, left - slot_bytes[layer]
        if count + 1 < num_experts:
            heapq.heappush(fewest, (count + 1, layer))
    return slots


def _fitting(wanted: Mapping[int, int], slot_bytes: Mapping[int, int], room_bytes: int) -> int:
    """How many of the wanted slots fit, the smallest first."""
    number = 0
    for each in sorted(slot_bytes[layer] for layer, count in wanted.items() for _ in range(count)):
        if each > room_bytes:
            break
        number, room_bytes = number + 1, room_bytes - each
    return number


class Placement:
    """The state of all layers' slots. `slots`: layer -> number of slots; `pins`: layer -> experts that never leave.

    An expert is *resident* once `arrived` was called for its move; before that its slot is reserved and nobody uses it.
    """

    def __init__(
        self,
        num_experts: int,
        slots: Mapping[int, int],
        pins: Mapping[int, Sequence[int]] | None = None,
        policy: Policy | None = None,
    ) -> None:
        self.policy = policy or Policy()
        self._layers = list(slots)
        self._row = {layer: row for row, layer in enumerate(self._layers)}
        self._decay = 0.5 ** (1 / self.policy.half_life_steps)
        shape = (len(self._layers), num_experts)
        self._counts: NDArray[np.float64] = np.zeros(shape)
        self._slot_of = np.full(shape, NONE, np.int32)  # slots of resident and arriving experts
        self._is_resident = np.zeros(shape, bool)
        self._is_pinned = np.zeros(shape, bool)
        self._free = [list(range(slots[layer]))[::-1] for layer in self._layers]  # the last is taken first
        self._pins_to_fill = [(layer, expert) for layer, experts in (pins or {}).items() for expert in experts]
        for layer, expert in self._pins_to_fill:
            self._is_pinned[self._row[layer], expert] = True

    def count(self, layer: int, uses: NDArray[np.int64]) -> None:
        """`uses` [E]: how many tokens of one decode step use each expert of `layer`."""
        self._counts[self._row[layer]] += uses

    def decay(self, steps: int = 1) -> None:
        """Decode steps have ended: all counts lose weight."""
        if steps:
            self._counts *= self._decay**steps

    def counts(self, layer: int) -> NDArray[np.float64]:
        """[E], a copy."""
        return self._counts[self._row[layer]].copy()

    def resident(self, layer: int) -> dict[int, int]:
        """expert -> slot."""
        row = self._row[layer]
        return {int(expert): int(self._slot_of[row, expert]) for expert in np.flatnonzero(self._is_resident[row])}

    def moves(self, most: int) -> list[Move]:
        """At most `most` moves, the most useful first. An evicted expert is no longer resident from now on."""
        chosen: list[Move] = []
        while len(chosen) < most and (move := self._next_move()) is not None:
            chosen.append(move)
        return chosen

    def arrived(self, move: Move) -> None:
        """The expert's weights are in its slot: it is resident."""
        row = self._row[move.layer]
        assert self._slot_of[row, move.expert] == move.slot and not self._is_resident[row, move.expert]
        self._is_resident[row, move.expert] = True

    def _next_move(self) -> Move | None:
        if self._pins_to_fill:
            layer, expert = self._pins_to_fill.pop(0)
            return self._place(self._row[layer], expert, None)
        rows = np.arange(len(self._layers))
        wanted, replaced = self._candidates(), self._victims()
        gained, lost = self._counts[rows, wanted], self._counts[rows, replaced]
        has_free = np.array([bool(free) for free in self._free])
        lost = np.where(has_free, 0.0, lost)
        is_open = self._slot_of[rows, wanted] == NONE
        may_replace = has_free | (self._is_evictable()[rows, replaced] & (gained >= self.policy.margin * lost))
        gain = np.where(is_open & may_replace, gained - lost, -1.0)
        row = int(gain.argmax()) if len(gain) else 0
        if not len(gain) or gain[row] < self.policy.least_count or gain[row] <= 0:
            return None
        return self._place(row, int(wanted[row]), None if has_free[row] else int(replaced[row]))

    def _candidates(self) -> NDArray[np.int64]:
        """The most used expert without a slot, for each layer."""
        return np.where(self._slot_of == NONE, self._counts, -1.0).argmax(axis=1)

    def _victims(self) -> NDArray[np.int64]:
        """The least used expert that may lose its slot, for each layer."""
        return np.where(self._is_evictable(), self._counts, np.inf).argmin(axis=1)

    def _is_evictable(self) -> NDArray[np.bool_]:
        return self._is_resident & ~self._is_pinned

    def _place(self, row: int, expert: int, evicted: int | None) -> Move:
        if evicted is None:
            slot = self._free[row].pop()
        else:
            slot = int(self._slot_of[row, evicted])
            self._slot_of[row, evicted], self._is_resident[row, evicted] = NONE, False
        self._slot_of[row, expert] = slot
        return Move(self._layers[row], expert, slot, evicted)
