"""`kt_runtime/device.py` and what `serve` asks of it, on the emulated accelerator."""

from __future__ import annotations

import threading

import pytest
import torch

from kt_runtime import device
from kt_runtime.device import PinnedBuffer
from kt_runtime.errors import UnknownNameError
from kt_runtime.serve import devices
from kt_runtime.serve.memory.server import plan_server
from kt_runtime.serve.models.presets import load_preset
from kt_runtime.serve.options.named import ServeOptions
from kt_runtime.sglang_patch.hooks import Hooks


@pytest.fixture
def where(scheduled_device: torch.device) -> torch.device:
    return torch.device(scheduled_device.type, 0)


def test_it_is_the_accelerator_and_has_no_cuda_kernels(where: torch.device) -> None:
    found = device.accelerator()
    assert found is not None and found.type == where.type and not device.has_cuda()
    hooks = Hooks.for_this_process()
    assert (hooks.on_cpu, hooks.has_cuda_kernels) == (False, False)
    (one,) = device.devices()
    assert (one.index, one.driver) == (0, "") and 0 < one.free_bytes <= one.total_bytes


def test_work_goes_to_the_stream_and_waits_for_the_event(where: torch.device) -> None:
    """One stream may be entered again, and by two threads at once."""
    stream, before = device.new_stream(where), device.current_stream(where)
    with device.guard(where), device.on(stream):
        assert device.current_stream(where) == stream
        with device.on(stream):
            tripled = torch.ones(64, device=where) * 3
        other = threading.Thread(target=device.on(stream).__enter__)
        other.start()
        other.join()
    assert device.current_stream(where) == before
    before.wait_event(device.recorded(stream))
    assert (tripled + 1).sum().item() == 256
    assert not device.is_capturing(where)


def test_a_buffer_is_pinned_and_not_given_away_before_its_copy_is_done(where: torch.device) -> None:
    buffer = PinnedBuffer()
    copies = []
    for value in range(4):
        host = buffer.shaped((32,), torch.float32)
        assert host.is_pinned()
        host.fill_(value)
        copies.append(torch.empty(32, device=where))
        copies[-1].copy_(host, non_blocking=True)
        buffer.busy_until(device.recorded(device=where))
    assert [copy.sum().item() for copy in copies] == [0, 32, 64, 96]


def test_random_numbers_inside_leave_the_devices_generator_as_it_was(where: torch.device) -> None:
    torch.manual_seed(1)
    expected = torch.rand(8, device=where).cpu()
    torch.manual_seed(1)
    with device.forked_randomness(where):
        torch.manual_seed(2)
        torch.rand(5, device=where)
    assert torch.equal(torch.rand(8, device=where).cpu(), expected)


def test_a_server_takes_it_and_plans_its_memory(late_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    first = f"{late_device.type}:0"
    assert devices.chosen_device(None) == devices.chosen_device(late_device.type) == first
    with pytest.raises(UnknownNameError, match=f"did you mean '{first}'"):
        devices.chosen_device(f"{late_device.type}:3")
    plan, free_bytes = plan_server(ServeOptions(model="m"), load_preset("tiny-qwen3-moe").config, "tiny")
    assert free_bytes["gpu"] == device.memory(torch.device(first)).free_bytes and plan.ring_chunk_experts > 0
    for name in ("KT_RUNTIME_DEVICE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")  # so that both are restored
    devices.use_host_only()
    assert devices.chosen_device(None) == "cpu" and not device.pinned(8).is_pinned()
