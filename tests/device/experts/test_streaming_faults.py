"""Each mistake in the order of the ring's two streams, planted, is found by calls on the emulated device under LATE."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from reference.expert_problems import build_layer, random_problem

from kt_runtime import device as devices
from kt_runtime.experts import ExpertLayer
from kt_runtime.experts.gpu import ring as ring_module
from kt_runtime.experts.gpu.paths import StreamingRule, attach_ring
from kt_runtime.experts.gpu.ring import ExpertRing

Patch = pytest.MonkeyPatch
TOLERANCE = 1.6e-6  # 1.7e-7 is measured without a fault
EXPERTS = 7


def a_slot_is_overwritten_before_it_was_consumed(patch: Patch) -> None:
    patch.setattr(ExpertRing, "_await_consumed", lambda self, slot: None)


def consumed_is_marked_before_the_work_is_queued(patch: Patch) -> None:
    await_ready = ExpertRing._await_ready

    def ready_and_marked(self: ExpertRing, slot: ring_module._Slot) -> None:
        slot.consumed = devices.recorded(device=self.device)
        await_ready(self, slot)

    patch.setattr(ExpertRing, "_await_ready", ready_and_marked)
    patch.setattr(ExpertRing, "_mark_consumed", lambda self, slot: None)


def consumed_is_recorded_on_the_copies_stream(patch: Patch) -> None:
    def mark(self: ExpertRing, slot: ring_module._Slot) -> None:
        slot.consumed = devices.recorded(self._stream)

    patch.setattr(ExpertRing, "_mark_consumed", mark)


def ready_is_not_awaited(patch: Patch) -> None:
    patch.setattr(ExpertRing, "_await_ready", lambda self, slot: None)


def ready_of_the_chunk_before_is_awaited(patch: Patch) -> None:
    """Not of the other slot: where the loader is a chunk ahead, that would be later than needed, and right."""
    events: list[torch.Event | None] = [None]

    def await_earlier(self: ExpertRing, slot: ring_module._Slot) -> None:
        if (event := events[-1]) is not None:
            devices.current_stream(self.device).wait_event(event)
        events.append(slot.ready)

    patch.setattr(ExpertRing, "_await_ready", await_earlier)


def a_pinned_buffer_is_reused_before_its_copy_ended(patch: Patch) -> None:
    patch.setattr(ExpertRing, "_await_copied", lambda self, slot: None)


def both_slots_share_their_pinned_memory(patch: Patch) -> None:
    made: dict[tuple[int, ...], torch.Tensor] = {}
    pinned = ring_module._pinned
    patch.setattr(ring_module, "_pinned", lambda shape: made.setdefault(shape, pinned(shape)))


FAULTS = [
    a_slot_is_overwritten_before_it_was_consumed,
    consumed_is_marked_before_the_work_is_queued,
    consumed_is_recorded_on_the_copies_stream,
    ready_is_not_awaited,
    ready_of_the_chunk_before_is_awaited,
    a_pinned_buffer_is_reused_before_its_copy_ended,
    both_slots_share_their_pinned_memory,
]


@pytest.fixture(scope="module")
def layer() -> ExpertLayer:
    return build_layer(random_problem(EXPERTS, 32, 16, 14, 2).experts)


def finish_all() -> None:
    """A fault leaves work behind that fails."""
    while True:
        try:
            torch.accelerator.synchronize()
        except RuntimeError:
            continue
        break


def is_right(layer: ExpertLayer, where: torch.device) -> bool:
    """Two calls on streams that alternate, chunk by chunk of one expert. The end of these streams alone is awaited: the
    ring's own stream is needed by nothing else."""
    ring = ExpertRing(where, layer.shape, 1)
    try:
        attach_ring([layer], ring, StreamingRule(1))
        problems = [random_problem(EXPERTS, 32, 16, 14, 2, seed=seed) for seed in (0, 0)]
        there = [[t.to(where) for t in (p.x, p.ids, p.weights)] for p in problems]
        queues = [devices.current_stream(where), devices.new_stream(where)]
        queues[1].wait_event(devices.recorded(device=where))
        found = []
        for queue, arguments in zip(queues, there, strict=True):
            with devices.on(queue):
                found.append(layer.forward(*arguments))
        for queue in queues:
            devices.recorded(queue).synchronize()
        wanted = [layer.forward(p.x, p.ids, p.weights) for p in problems]
        return all(bool((f.cpu() - w).norm() <= TOLERANCE * w.norm()) for f, w in zip(found, wanted, strict=True))
    finally:
        layer.device_paths = None
        ring.close()


def test_without_a_fault_the_calls_are_right(late_device: torch.device, layer: ExpertLayer) -> None:
    for _ in range(3):
        assert is_right(layer, late_device)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found(
    late_device: torch.device,
    layer: ExpertLayer,
    monkeypatch: Patch,
    fault: Callable[[Patch], None],
) -> None:
    fault(monkeypatch)
    try:
        right = is_right(layer, late_device)
    except RuntimeError as error:
        print(f"{fault.__name__}: {error!r:.200}")
        right = False
    finish_all()
    assert not right
