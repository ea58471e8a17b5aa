"""Experts that stream through the ring of the emulated device, under every schedule: their results beside those of the
calls that the CPU computes, below the threshold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from reference.expert_problems import Problem, build_layer, present, random_problem, tensors_of
from torch import Tensor

from kt_runtime import device as devices
from kt_runtime.errors import ConflictError, NumericsError
from kt_runtime.experts import ExpertLayer, LoraSlot, routed_experts, routed_experts_for_backward
from kt_runtime.experts.gpu.paths import StreamedTokens, StreamingRule, attach_ring
from kt_runtime.experts.gpu.ring import ExpertRing
from kt_runtime.experts.gpu.streamed import StreamedActivations
from kt_runtime.experts.gpu.threshold import measured

TOKENS = 12
EXPERTS, HIDDEN, INNER = 5, 64, 32
# Of a result's norm. A grouped product rounds to bfloat16. Measured: 1.1e-7 to 1.9e-7 and 4.5e-3; 3.0e-7 and 2.6e-3.
FORWARD = {torch.float32: 1.1e-6, torch.bfloat16: 4e-2}
GRADIENTS = {torch.float32: 2.8e-6, torch.bfloat16: 2.5e-2}

Streams = tuple[ExpertLayer, StreamingRule, StreamedTokens]


@pytest.fixture(scope="module")
def layer() -> ExpertLayer:
    return build_layer(problem().experts)


@pytest.fixture
def streams(layer: ExpertLayer, scheduled_device: torch.device) -> Iterator[Streams]:
    ring, rule = ExpertRing(scheduled_device, layer.shape, 2), StreamingRule(TOKENS)
    yield layer, rule, attach_ring([layer], ring, rule)
    layer.device_paths = None
    ring.close()


def problem(dtype: torch.dtype = torch.float32, seed: int = 0) -> Problem:
    """Adapters of two ranks with dropout, tokens without one, pairs that are not routed."""
    p = random_problem(EXPERTS, HIDDEN, INNER, TOKENS, 2, dtype=dtype, ranks=(4, 6), seed=seed)
    p.slots = [replace(slot, dropout=0.25, seed=11 + index) for index, slot in enumerate(p.adapters)]
    return p


def on(where: torch.device, p: Problem) -> Problem:
    slots = [slot.with_tensors([t.to(where) for t in tensors_of(slot)]) for slot in p.adapters]
    there = {name: getattr(p, name).to(where) for name in ("x", "ids", "weights", "token_slots", "grad_out")}
    return replace(p, slots=list(slots), **there)


def assert_as(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    found, wanted = found.cpu().double(), wanted.cpu().double()
    assert (found - wanted).norm() <= tolerance * wanted.norm()


@pytest.mark.parametrize("dtype", FORWARD)
def test_forward_above_the_threshold_is_that_below_it(
    streams: Streams, scheduled_device: torch.device, dtype: torch.dtype
) -> None:
    layer, rule, counts = streams
    p = on(scheduled_device, problem(dtype))
    streamed = layer.forward(p.x, p.ids, p.weights, **p.lora)
    assert (counts.forward, streamed.device, streamed.dtype) == (TOKENS, scheduled_device, dtype)
    rule.threshold_tokens = TOKENS + 1
    assert_as(streamed, layer.forward(p.x, p.ids, p.weights, **p.lora), FORWARD[dtype])
    assert counts.forward == TOKENS


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_gradients_above_the_threshold_are_those_below_it(
    streams: Streams, scheduled_device: torch.device, dtype: torch.dtype
) -> None:
    layer, rule, counts = streams
    p = on(scheduled_device, problem(dtype))
    found = []
    for threshold in (TOKENS, None):
        rule.threshold_tokens = threshold
        _, retained = layer.forward_retaining(p.x, p.ids, p.weights, **p.lora)
        assert isinstance(retained, StreamedActivations) == (threshold is not None)
        for kept in (retained, None):
            made = layer.backward(p.grad_out, p.x, p.ids, p.weights, **p.lora, retained=kept)
            found.append([made.x, made.weights, *(t for slot in made.slots for t in tensors_of(slot))])
    assert (counts.forward, counts.backward) == (TOKENS, 2 * TOKENS)
    for kept_one, again, wanted, _ in zip(*found, strict=True):
        assert kept_one.device == scheduled_device and torch.equal(kept_one.cpu(), again.cpu())
        assert_as(kept_one, wanted, GRADIENTS[dtype])


def test_training_takes_the_same_ring(streams: Streams, scheduled_device: torch.device) -> None:
    layer, rule, counts = streams
    p = on(scheduled_device, problem())
    found = []
    for threshold in (TOKENS, None):
        rule.threshold_tokens = threshold
        for compute in (routed_experts, routed_experts_for_backward):
            masters = [t.detach().clone().requires_grad_() for t in tensors_of(p.slots[0])]
            x, weights = (t.detach().clone().requires_grad_() for t in (p.x, p.weights))
            slot = replace(p.adapters[0], scaling=0.5).with_tensors(masters)
            (compute(layer, x, p.ids, weights, slot) * p.grad_out).sum().backward()
            found.append([present(t.grad) for t in (x, weights, *masters)])
    assert counts.backward == 2 * TOKENS
    for streamed, alone, wanted, _ in zip(*found, strict=True):
        assert_as(streamed, wanted, GRADIENTS[torch.float32])
        assert torch.equal(alone.cpu(), streamed.cpu())


def test_calls_follow_each_other_on_streams_that_alternate(streams: Streams, scheduled_device: torch.device) -> None:
    """The next call's copies may begin before the last call's products have run."""
    layer = streams[0]
    problems = [problem(seed=seed) for seed in range(4)]
    queues = [devices.current_stream(scheduled_device), devices.new_stream(scheduled_device)]
    there = [on(scheduled_device, p) for p in problems]
    for queue in queues:
        queue.wait_event(devices.recorded(device=scheduled_device))
    found = []
    for index, p in enumerate(there):
        with devices.on(queues[index % 2]):
            found.append(layer.forward(p.x, p.ids, p.weights, **p.lora))
    torch.accelerator.synchronize()
    for result, p in zip(found, problems, strict=True):
        assert_as(result, layer.forward(p.x, p.ids, p.weights, **p.lora), FORWARD[torch.float32])


def test_input_that_is_still_being_made_is_awaited(streams: Streams, scheduled_device: torch.device) -> None:
    layer = streams[0]
    p = problem()
    there = on(scheduled_device, p)
    x = there.x * 3 - 2 * there.x
    wanted = layer.forward(p.x * 3 - 2 * p.x, p.ids, p.weights, **p.lora)
    assert_as(layer.forward(x, there.ids, there.weights, **there.lora), wanted, FORWARD[torch.float32])


def test_an_adapter_that_changes_between_calls_is_read_again(streams: Streams, scheduled_device: torch.device) -> None:
    layer = streams[0]
    p = on(scheduled_device, problem())
    before = layer.forward(p.x, p.ids, p.weights, **p.lora)
    for tensor in tensors_of(p.slots[0]):
        tensor.mul_(2)
    after = layer.forward(p.x, p.ids, p.weights, **p.lora)
    host = [slot.with_tensors([t.cpu() for t in tensors_of(slot)]) for slot in p.adapters]
    wanted = layer.forward(
        p.x.cpu(), p.ids.cpu(), p.weights.cpu(), slots=host, token_slots=present(p.token_slots).cpu()
    )
    assert_as(after, wanted, FORWARD[torch.float32])
    assert not torch.equal(before.cpu(), after.cpu())


def test_a_failure_while_loading_reaches_the_caller_and_the_next_call_works(
    streams: Streams, scheduled_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = streams[0]
    p = problem()
    there = on(scheduled_device, p)
    unpack = layer.unpack_range

    def failing(first: int, count: int, w13: Tensor, w2: Tensor) -> None:
        if first >= 3:
            raise ConflictError("the expert store of this layer is closed")
        unpack(first, count, w13, w2)

    with monkeypatch.context() as patch:
        patch.setattr(layer, "unpack_range", failing)
        with pytest.raises(ConflictError, match="the expert store of this layer is closed"):
            layer.forward(there.x, there.ids, there.weights, **there.lora)
    there.x[3, 2] = float("nan")
    with pytest.raises(NumericsError, match=r"x\[3, 2\] is NaN or Inf"):
        layer.forward(there.x, there.ids, there.weights, **there.lora)
    there.x[3, 2] = 0.5
    p.x[3, 2] = 0.5
    wanted = layer.forward(p.x, p.ids, p.weights, **p.lora)
    assert_as(layer.forward(there.x, there.ids, there.weights, **there.lora), wanted, FORWARD[torch.float32])


def test_a_pass_that_is_left_early_does_not_spoil_the_next_one(
    streams: Streams, scheduled_device: torch.device
) -> None:
    layer = streams[0]
    ring = present(present(layer.device_paths).ring)
    p = problem()
    there = on(scheduled_device, p)
    wanted = layer.forward(p.x, p.ids, p.weights, **p.lora)
    for taken in range(3):
        with closing(ring.chunks(layer, range(EXPERTS))) as chunks:
            for _ in range(taken):
                next(chunks)
        assert_as(layer.forward(there.x, there.ids, there.weights, **there.lora), wanted, FORWARD[torch.float32])


def test_the_threshold_is_measured_with_the_device(layer: ExpertLayer, late_device: torch.device) -> None:
    ring = ExpertRing(late_device, layer.shape, 3)
    try:
        found = measured(ring, layer, 3, torch.bfloat16, 64)
    finally:
        ring.close()
    assert [one.tokens for one in found.timed] == [16, 32, 64][: len(found.timed)]
    assert found.tokens is None or 1 <= found.tokens <= 64


def test_slots_without_adapters_need_none(streams: Streams, scheduled_device: torch.device) -> None:
    layer = streams[0]
    p = problem()
    there = on(scheduled_device, p)
    slots: list[LoraSlot | None] = [None, there.slots[1]]
    wanted = layer.forward(p.x, p.ids, p.weights, slots=[None, p.slots[1]], token_slots=p.token_slots)
    found = layer.forward(there.x, there.ids, there.weights, slots=slots, token_slots=there.token_slots)
    assert_as(found, wanted, FORWARD[torch.float32])
