"""Each mistake at the boundary of host and device, planted into the staging of experts, is found by the tests there."""

# ruff: noqa: F811, a test names its fixtures
from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from device import backend
from reference.on_device import experts as bodies
from reference.on_device.experts import layer  # noqa: F401

from kt_runtime import device
from kt_runtime.errors import KtError
from kt_runtime.experts import ExpertLayer
from kt_runtime.experts.gpu import staging

Patch = pytest.MonkeyPatch


class NoWait:
    def synchronize(self) -> None:
        pass


def result_is_not_awaited(patch: Patch) -> None:
    patch.setattr(device.PinnedBuffer, "busy_until", lambda self, event: None)


def inputs_are_not_awaited(patch: Patch) -> None:
    record = device.recorded
    patch.setattr(device, "recorded", lambda stream=None, device=None: NoWait() if stream is None else record(stream))


def the_wrong_stream_is_awaited(patch: Patch) -> None:
    record = device.recorded
    patch.setattr(device, "recorded", lambda stream=None, device=None: record(stream or backend.default_stream()))


def the_event_comes_before_the_copy(patch: Patch) -> None:
    def to_device(host: torch.Tensor, there: torch.Tensor, buffer: device.PinnedBuffer) -> None:
        buffer.busy_until(device.recorded(device=there.device))
        there.copy_(host, non_blocking=True)

    patch.setattr(staging, "_to_device", to_device)


def inputs_are_not_copied(patch: Patch) -> None:
    def to_host(tensors: dict[str, torch.Tensor | None], where: torch.device) -> dict[str, torch.Tensor]:
        return {name: staging._buffers.get(name).like(t) for name, t in tensors.items() if t is not None}

    patch.setattr(staging, "_to_host", to_host)


def all_inputs_share_a_buffer(patch: Patch) -> None:
    one = device.PinnedBuffer()
    patch.setattr(staging._Buffers, "get", lambda self, name: one)


def the_result_stays_on_the_host(patch: Patch) -> None:
    forward = staging.forward
    patch.setattr(staging, "forward", lambda *a, **k: (forward(*a, **k)[0].cpu(), None))


def gradients_stay_on_the_host(patch: Patch) -> None:
    patch.setattr(staging, "_like_slot", lambda grads, slot: grads)


def an_adapter_s_version_is_ignored(patch: Patch) -> None:
    copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def host_adapter(tensor: torch.Tensor) -> torch.Tensor:
        return copies.setdefault(id(tensor), (tensor, tensor.detach().cpu()))[1]

    patch.setattr(staging, "_host_adapter", host_adapter)


def an_adapter_is_copied_without_being_awaited(patch: Patch) -> None:
    patch.setattr(staging, "_host_adapter", lambda tensor: tensor.detach().to("cpu", non_blocking=True))


FAULTS = [
    result_is_not_awaited,
    inputs_are_not_awaited,
    the_wrong_stream_is_awaited,
    the_event_comes_before_the_copy,
    inputs_are_not_copied,
    all_inputs_share_a_buffer,
    the_result_stays_on_the_host,
    gradients_stay_on_the_host,
    an_adapter_s_version_is_ignored,
    an_adapter_is_copied_without_being_awaited,
]


@pytest.fixture
def fresh_buffers(monkeypatch: Patch) -> Iterator[None]:
    monkeypatch.setattr(staging, "_buffers", staging._Buffers())
    yield
    while True:  # a fault leaves work behind that fails
        try:
            torch.accelerator.synchronize()
        except RuntimeError:
            continue
        break


def run_bodies(layer: ExpertLayer, where: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        bodies.test_forward_gives_the_same_bits(layer, where, dtype)
    bodies.test_calls_follow_each_other_without_mixing(layer, where)
    bodies.test_streams_that_alternate_do_not_overwrite_each_other_s_results(layer, where)
    bodies.test_input_is_awaited_on_the_current_stream(layer, where, lambda: None)
    bodies.test_backward_gives_the_same_bits(layer, where)
    bodies.test_an_adapter_changed_in_place_is_copied_again(layer, where)
    bodies.test_gradients_flow_on_the_device(layer, where)
    torch.accelerator.synchronize()


def is_found(fault: Callable[[Patch], None], layer: ExpertLayer, where: torch.device, patch: Patch) -> bool:
    fault(patch)
    try:
        run_bodies(layer, where)
    except (AssertionError, RuntimeError, TypeError, AttributeError, KtError) as error:
        print(f"{fault.__name__}: {error!r:.200}")
        return True
    return False


def test_without_a_fault_the_bodies_pass(
    fresh_buffers: None,
    late_device: torch.device,
    layer: ExpertLayer,
) -> None:
    run_bodies(layer, late_device)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found_under_late(
    fresh_buffers: None,
    late_device: torch.device,
    layer: ExpertLayer,
    monkeypatch: Patch,
    fault: Callable[[Patch], None],
) -> None:
    assert is_found(fault, layer, late_device, monkeypatch)


def host_work_on_device_memory() -> None:
    """Run in a process of its own: its end is a segmentation fault."""
    where = backend.enable()

    def host_view(tensor: torch.Tensor) -> torch.Tensor:
        memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
        return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)

    staging._host_adapter = host_view
    x = bodies.call_on(where, bodies.call(torch.float32))["x"]
    torch.accelerator.synchronize()
    print("here", flush=True)
    staging._host_adapter(x).sum()
    print("not here")


def test_host_work_on_device_memory_ends_the_process() -> None:
    code = "from device.experts import test_staging_faults; test_staging_faults.host_work_on_device_memory()"
    run = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert (run.stdout, run.returncode) == ("here\n", -signal.SIGSEGV), run.stderr
