"""A device's tensors through the expert store's pinned buffers give what the same numbers give on the CPU, to the bit.

Bodies of tests: a folder for a device imports them. Its conftest has the fixtures `device`, and `delay`, a function
that keeps the current stream busy.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypedDict

import pytest
import torch
from reference.drawn import drawn
from reference.expert_problems import tensors_of
from safetensors.torch import save_file

from kt_runtime.device import current_stream, is_host, new_stream, on, recorded
from kt_runtime.errors import InvalidValueError
from kt_runtime.experts import ExpertLayer, ExpertShape, ExpertStore, LoraSlot, routed_experts

SHAPE = ExpertShape(num_experts=6, hidden=96, intermediate=48)
TOKENS, TOP_K, RANK = 40, 3, 4


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory) -> ExpertLayer:
    directory: Path = tmp_path_factory.mktemp("experts")
    generator = torch.Generator().manual_seed(0)
    e, h, i = SHAPE.num_experts, SHAPE.hidden, SHAPE.intermediate
    tensors = {
        "m.gate_up_proj": (torch.randn(e, 2 * i, h, generator=generator) / h**0.5).bfloat16(),
        "m.down_proj": (torch.randn(e, h, i, generator=generator) / i**0.5).bfloat16(),
    }
    save_file(tensors, directory / "model.safetensors")
    return ExpertStore.load(directory, {0: "m"}, SHAPE).layers[0]


class Call(TypedDict):
    """Arguments of ExpertLayer."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


def call(dtype: torch.dtype, seed: int = 1) -> Call:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(TOKENS, SHAPE.hidden, generator=generator).to(dtype),
        "ids": torch.randint(-1, SHAPE.num_experts, (TOKENS, TOP_K), generator=generator),
        "weights": torch.rand(TOKENS, TOP_K, generator=generator),
    }


def adapter(seed: int = 2) -> LoraSlot:
    generator = torch.Generator().manual_seed(seed)
    e, h, i = SHAPE.num_experts, SHAPE.hidden, SHAPE.intermediate
    shapes = [(e, RANK, h), (e, i, RANK), (e, RANK, h), (e, i, RANK), (e, RANK, i), (e, h, RANK)]
    tensors = [torch.randn(shape, generator=generator) * 0.2 for shape in shapes]
    return LoraSlot(scaling=0.5).with_tensors(tensors)


def slot_on(device: torch.device, slot: LoraSlot) -> LoraSlot:
    return slot.with_tensors([None if t is None else t.to(device) for t in slot.tensors()])


def call_on(device: torch.device, tensors: Call) -> Call:
    return {
        "x": tensors["x"].to(device),
        "ids": tensors["ids"].to(device),
        "weights": tensors["weights"].to(device),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_gives_the_same_bits(layer: ExpertLayer, device: torch.device, dtype: torch.dtype) -> None:
    arguments, slot = call(dtype), adapter()
    token_slots = torch.arange(TOKENS).remainder(2).sub(1).int()
    wanted = layer.forward(**arguments, slots=[slot], token_slots=token_slots)
    got = layer.forward(**call_on(device, arguments), slots=[slot_on(device, slot)], token_slots=token_slots.to(device))
    assert not is_host(got) and torch.equal(got.cpu(), wanted)


def test_calls_follow_each_other_without_mixing(layer: ExpertLayer, device: torch.device) -> None:
    calls = [call(torch.bfloat16, seed) for seed in range(20)]
    wanted = [layer.forward(**arguments) for arguments in calls]
    got = [layer.forward(**call_on(device, arguments)) for arguments in calls]
    assert all(torch.equal(g.cpu(), w) for g, w in zip(got, wanted, strict=True))


def test_streams_that_alternate_do_not_overwrite_each_other_s_results(layer: ExpertLayer, device: torch.device) -> None:
    """Each call waits for its own stream alone: the copy of the last result may still be queued on the other one."""
    calls = [call(torch.float32, seed) for seed in range(6)]
    wanted = [layer.forward(**arguments) for arguments in calls]
    moved = [call_on(device, arguments) for arguments in calls]
    streams = [new_stream(device), new_stream(device)]
    for stream in streams:
        stream.wait_event(recorded(current_stream(device)))
    got = []
    for index, arguments in enumerate(moved):
        with on(streams[index % 2]):
            got.append(layer.forward(**arguments))
    for stream in streams:
        stream.synchronize()
    assert all(torch.equal(g.cpu(), w) for g, w in zip(got, wanted, strict=True))


def test_input_is_awaited_on_the_current_stream(
    layer: ExpertLayer, device: torch.device, delay: Callable[[], None]
) -> None:
    arguments = call_on(device, call(torch.float32))
    wanted = layer.forward(**call_on(device, call(torch.float32)))
    stream = new_stream(device)
    stream.wait_event(recorded(current_stream(device)))
    with on(stream):
        late = torch.zeros_like(arguments["x"])
        delay()
        late.copy_(arguments["x"])
        got = layer.forward(late, arguments["ids"], arguments["weights"])
    stream.synchronize()
    assert torch.equal(got, wanted)


def test_backward_gives_the_same_bits(layer: ExpertLayer, device: torch.device) -> None:
    arguments, slot = call(torch.float32), adapter()
    token_slots = torch.zeros(TOKENS, dtype=torch.int32)
    grad_out = drawn(TOKENS, SHAPE.hidden, seed=3)
    wanted = layer.backward(grad_out, **arguments, slots=[slot], token_slots=token_slots)
    got = layer.backward(
        grad_out.to(device),
        **call_on(device, arguments),
        slots=[slot_on(device, slot)],
        token_slots=token_slots.to(device),
    )
    pairs = zip(tensors_of(got.slots[0]), tensors_of(wanted.slots[0]), strict=True)
    for g, w in [(got.x, wanted.x), (got.weights, wanted.weights), *pairs]:
        assert not is_host(g) and torch.equal(g.cpu(), w)


def test_an_adapter_changed_in_place_is_copied_again(layer: ExpertLayer, device: torch.device) -> None:
    arguments, slot = call_on(device, call(torch.float32)), slot_on(device, adapter())
    token_slots = torch.zeros(TOKENS, dtype=torch.int32, device=device)
    before = layer.forward(**arguments, slots=[slot], token_slots=token_slots)
    assert slot.down_b is not None
    slot.down_b.mul_(2)
    after = layer.forward(**arguments, slots=[slot], token_slots=token_slots)
    assert not torch.equal(before, after)


def test_gradients_flow_on_the_device(layer: ExpertLayer, device: torch.device) -> None:
    arguments = call_on(device, call(torch.float32))
    x = arguments["x"].requires_grad_()
    slot = slot_on(device, adapter())
    tensors = [t.requires_grad_() for t in slot.tensors() if t is not None]
    routed_experts(layer, x, arguments["ids"], arguments["weights"], slot.with_tensors(tensors)).sum().backward()
    assert all(t.grad is not None and not is_host(t.grad) for t in [x, *tensors])


def test_tensors_on_different_devices_are_refused(layer: ExpertLayer, device: torch.device) -> None:
    arguments = call_on(device, call(torch.float32))
    arguments["ids"] = arguments["ids"].cpu()
    with pytest.raises(InvalidValueError, match=rf"ids is on cpu, x on {device}"):
        layer.forward(**arguments)
