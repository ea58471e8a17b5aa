"""Each mistake in the order of hot experts' steps, moves and copies, planted, is found by the tests on the device.

All plants are found under LATE. Some are also found under random schedules, where the order that hides them is rare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from device import backend
from reference.on_device import hot as bodies

from kt_runtime import device
from kt_runtime.errors import KtError
from kt_runtime.experts.gpu.hot import layer as hot_layer
from kt_runtime.experts.gpu.hot.lanes import Lane
from kt_runtime.experts.gpu.hot.layer import HotExperts
from kt_runtime.experts.gpu.hot.set import HotSet
from kt_runtime.experts.gpu.hot.slots import Form, PackedSlots

Patch = pytest.MonkeyPatch


def the_table_shows_an_expert_before_its_weights_are_there(patch: Patch) -> None:
    send = HotSet._send

    def sent(self: HotSet, carrier: Any, move: Any) -> None:
        send(self, carrier, move)
        self.layers[move.layer]._set(move.expert, move.slot)
        self.placement.arrived(move)

    def admit(self: HotSet, carrier: Any) -> None:
        if carrier.load is not None and carrier.load[1].query():
            carrier.load = None

    patch.setattr(HotSet, "_send", sent)
    patch.setattr(HotSet, "_admit", admit)


def a_slot_is_filled_while_a_step_still_reads_it(patch: Patch) -> None:
    patch.setattr(Lane, "follows", lambda self, mark: None)


def a_buffer_carries_the_next_expert_before_the_last_has_left(patch: Patch) -> None:
    send = HotSet._send

    def sent(self: HotSet, carrier: Any, move: Any) -> None:
        send(self, carrier, move)
        waiting.append((move, carrier.load[1]))
        carrier.load = None

    def turn(self: HotSet) -> None:
        for move, filled in list(waiting):
            if move.layer in self.layers and filled.query():
                self.layers[move.layer].admit(move.expert, move.slot, filled)
                self.placement.arrived(move)
                waiting.remove((move, filled))
        original(self)

    waiting: list[Any] = []
    original = HotSet.turn
    patch.setattr(HotSet, "_send", sent)
    patch.setattr(HotSet, "turn", turn)


def the_table_of_the_device_changes_out_of_order(patch: Patch) -> None:
    def changed(self: HotExperts, expert: int, slot: int) -> None:
        self._device_table[expert : expert + 1].fill_(slot)  # on the current stream, not in the lane
        self.table[expert] = slot

    patch.setattr(HotExperts, "_set", changed)


def hits_are_not_awaited(patch: Patch) -> None:
    patch.setattr(Lane, "precedes_current", lambda self: None)


def the_inputs_of_hits_are_not_awaited(patch: Patch) -> None:
    patch.setattr(Lane, "follows_current", lambda self: None)


def hits_are_added_twice(patch: Patch) -> None:
    original = hot_layer.hit_sum

    def doubled(*args: Any) -> None:
        original(*args)
        args[-1].mul_(2)

    patch.setattr(hot_layer, "hit_sum", doubled)


def hits_are_computed_by_the_store_too(patch: Patch) -> None:
    patch.setattr(HotExperts, "hits", lambda self, ids, token_slots: np.zeros(ids.shape, bool))


def adapters_hit_on_the_device_only(patch: Patch) -> None:
    hits = HotExperts.hits
    patch.setattr(HotExperts, "hits", lambda self, ids, token_slots: hits(self, ids, None))


def training_hits(patch: Patch) -> None:
    takes = HotExperts.takes

    def always(self: HotExperts, *args: Any) -> bool:
        before, self.step.is_serving = self.step.is_serving, True
        try:
            return takes(self, *args)
        finally:
            self.step.is_serving = before

    patch.setattr(HotExperts, "takes", always)


def weights_are_dequantized_beside_the_lane(patch: Patch) -> None:
    weights = PackedSlots.weights

    def beside(self: PackedSlots, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with device.on(device.new_stream(chosen.device)):
            return weights(self, chosen)

    patch.setattr(PackedSlots, "weights", beside)


def the_scratch_of_the_last_call_is_used(patch: Patch) -> None:
    original = PackedSlots.weights

    def stale(self: PackedSlots, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        w13, w2 = self._scratch.w13[: len(chosen)].clone(), self._scratch.w2[: len(chosen)].clone()
        original(self, chosen)
        return w13, w2

    patch.setattr(PackedSlots, "weights", stale)


FAULTS = [
    the_table_shows_an_expert_before_its_weights_are_there,
    a_slot_is_filled_while_a_step_still_reads_it,
    a_buffer_carries_the_next_expert_before_the_last_has_left,
    the_table_of_the_device_changes_out_of_order,
    hits_are_not_awaited,
    the_inputs_of_hits_are_not_awaited,
    hits_are_added_twice,
    hits_are_computed_by_the_store_too,
    adapters_hit_on_the_device_only,
    training_hits,
]
OF_PUBLISHED = [weights_are_dequantized_beside_the_lane, the_scratch_of_the_last_call_is_used]
CASES = [(fault, form) for form in bodies.FORMS for fault in FAULTS] + [(fault, "published") for fault in OF_PUBLISHED]


@pytest.fixture
def late(late_device: torch.device) -> Iterator[torch.device]:
    yield late_device
    while True:  # a fault leaves work behind that fails
        try:
            torch.accelerator.synchronize()
        except RuntimeError:
            continue
        break


@bodies.each_form
def test_without_a_fault_the_bodies_pass(late: torch.device, expert_tolerance: bodies.Tolerance, form: Form) -> None:
    bodies.run_all(late, expert_tolerance, form)


@pytest.mark.parametrize(("fault", "form"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_a_planted_fault_is_found(
    late: torch.device,
    expert_tolerance: bodies.Tolerance,
    monkeypatch: Patch,
    fault: Callable[[Patch], None],
    form: Form,
) -> None:
    fault(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, KtError)) as found:
        bodies.run_all(late, expert_tolerance, form)
        torch.accelerator.synchronize()
    print(f"{fault.__name__}: {str(found.value)[:200]}")


@bodies.each_form
def test_a_decode_step_waits_for_the_inputs_of_the_store_alone(late: torch.device, form: Form) -> None:
    """Hits add no wait of the host: sorting, products and the sum are queued without reading a value on the host."""
    layer, hot, call = bodies.one_layer(late, form)
    with backend.no_hidden_waits(), hot.step(decoded_tokens=bodies.T):
        layer.forward(**call)
    assert hot.use().layers[0].hits > 0


@bodies.each_form
def test_a_turn_waits_for_nothing(late: torch.device, form: Form) -> None:
    layer, hot, call = bodies.one_layer(late, form)
    with backend.no_hidden_waits():
        for _ in range(3):
            with hot.step(decoded_tokens=bodies.T):
                layer.forward(**call)
            hot.turn()
    assert hot.use().moves > 2 and device.accelerator() is not None
