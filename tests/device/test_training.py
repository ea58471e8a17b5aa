"""The training twin on the emulated device: calls, optimizer steps, checkpoints and publishing give the CPU's numbers.

The host is the fake engine of tests/unit/resident with its tensors on the device; experts stay in the CPU's store.
"""

# ruff: noqa: F811, a test names its fixtures
from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from device import backend
from device.conftest import SCHEDULES
from reference.resident.desk import Desk
from unit.resident.conftest import FakeHost, Lab, checkpoints, make_batch  # noqa: F401

from kt_runtime.adapters import AdapterVersion
from kt_runtime.resident.scheduler import run_at_once
from kt_runtime.resident.training import checkpoint
from kt_runtime.resident.training.session import Session

FAMILIES = ("deepseek_v2", "deepseek_v3", "qwen3_moe")
# Sums in another order: PyTorch multiplies on the device, and norms, rotation and routing are native on the CPU.
LOSS = 2.7e-7  # 4.2e-8 measured with AVX-512, 3.1e-8 with AVX2
NORM = 1.9e-6  # 2.7e-7 and 2.5e-7
MOST_WAITS = 54
EPSILON = 1e-5  # AdamW divides a gradient of 1e-8 by as much and makes its rounding a whole step
PARAMETER = 1.0e-4  # 1.5e-5 measured, of parameters that moved by 0.015
Make = Callable[..., Lab]


class DeviceHost(FakeHost):
    """Dense weights on `device`, as SGLang has them on a GPU."""

    def __init__(self, directory: Path, device: torch.device) -> None:
        super().__init__(directory, attends_in_float32=False)
        self.device = device
        self._tensors = {name: tensor.to(device) for name, tensor in self._tensors.items()}


class SameLab(Lab):
    """Sessions begin with the same values on every device."""

    def session(self, targets: Sequence[str] = ("all",), *, fill: bool = True, **settings: Any) -> Session:
        session = super().session(targets, fill=False, **settings)
        generator = torch.Generator().manual_seed(11)
        for name, parameter in sorted(session.parameters.items()):
            if fill and name.endswith("lora_B"):
                parameter.data.copy_(torch.empty(parameter.shape).normal_(0, 0.05, generator=generator))
        return session


@pytest.fixture
def make(checkpoints: dict[str, Path]) -> Make:
    """`make(family, device)`; without a device, one on the CPU that attends as on a device."""

    def made(family: str, device: torch.device | None = None) -> Lab:
        directory = checkpoints[family]
        host = FakeHost(directory, attends_in_float32=False) if device is None else DeviceHost(directory, device)
        return SameLab(host)

    return made


def trained(lab: Lab, batches: Sequence[Any], **settings: Any) -> tuple[list[float], Session]:
    """Losses and norms of gradients of steps with two microbatches, one after the other."""
    session, numbers = lab.session(**settings), []
    for batch in batches:
        loss = lab.forward_backward(session, batch, 32).loss
        numbers += [loss, lab.step(session, 5e-3, epsilon=EPSILON, weight_decay=0.01, max_grad_norm=5.0)]
    return numbers, session


@pytest.mark.parametrize("family", FAMILIES)
def test_training_gives_the_cpus_numbers(late_device: torch.device, make: Make, make_batch: Any, family: str) -> None:
    batches = [make_batch(20, 11, 25, seed=step) for step in range(3)]
    wanted, reference = trained(make(family), batches)
    got, session = trained(make(family, late_device), batches)
    assert got == pytest.approx(wanted, rel=NORM) and got[::2] == pytest.approx(wanted[::2], rel=LOSS)
    assert all(parameter.device == late_device for parameter in session.parameters.values())
    values = {name: parameter.detach().cpu() for name, parameter in session.parameters.items()}
    worst = max(float((values[name] - p.detach()).abs().max()) for name, p in reference.parameters.items())
    relative = [max(abs(g / w - 1) for g, w in zip(got[i::2], wanted[i::2], strict=True)) for i in range(2)]
    print(f"{family}: differences of losses {relative[0]:.1e}, norms {relative[1]:.1e}, parameters {worst:.1e}")
    assert worst <= PARAMETER


def test_no_order_of_work_changes_a_bit(
    late_device: torch.device, make: Make, make_batch: Any, subtests: pytest.Subtests
) -> None:
    """With dropout, whose masks are drawn again when activations are recomputed."""
    batches = [make_batch(12, 9, seed=4)]
    wanted, reference = trained(make("qwen3_moe", late_device), batches, dropout=0.2)
    values = {name: parameter.cpu() for name, parameter in reference.parameters.items()}
    for schedule in SCHEDULES:
        with subtests.test(schedule):
            name, _, seed = schedule.partition("-")
            backend.set_schedule(name, int(seed or 0))
            got, session = trained(make("qwen3_moe", late_device), batches, dropout=0.2)
            assert got == wanted
            assert all(torch.equal(parameter.cpu(), values[name]) for name, parameter in session.parameters.items())


def test_a_saved_session_goes_on_with_the_same_bits(
    late_device: torch.device,
    make: Make,
    make_batch: Any,
    tmp_path: Path,
) -> None:
    """As a checkpoint or a published version takes them."""
    _, session = trained(make("deepseek_v3", late_device), [make_batch(12, 9)])
    adapter = run_at_once(checkpoint.copied_masters(session))
    assert all(t.device.type == "cpu" for pair in adapter.modules.values() for t in (pair.a, pair.b))
    for name, pair in adapter.modules.items():
        assert torch.equal(pair.a, session.parameters[f"{name}.lora_A"].cpu())
        assert torch.equal(pair.b, session.parameters[f"{name}.lora_B"].cpu())


def test_what_is_published_is_what_was_trained(
    late_device: torch.device,
    make: Make,
    make_batch: Any,
    tmp_path: Path,
) -> None:
    desk = Desk(make("deepseek_v3", late_device), tmp_path / "versions")
    try:
        _, session = trained(desk.lab, [make_batch(12, 9)])
        trained_adapter = run_at_once(checkpoint.copied_masters(session))
        desk.publisher.publish("bob", trained_adapter, "a test", desk.outcomes.append)
        desk.settle()
        desk.written()
        (version,) = desk.outcomes
        assert isinstance(version, AdapterVersion)
        served = desk.host.installed[version.lora_id]
        for name, pair in trained_adapter.modules.items():
            assert torch.equal(served.modules[name].b.cpu(), pair.b) and torch.equal(
                served.modules[name].a.cpu(), pair.a
            )
    finally:
        desk.publisher.close()
        desk.workers.close()


def test_the_waits_of_a_training_step_are_known(late_device: torch.device, make: Make, make_batch: Any) -> None:
    """Each stops the device until the host has read something: a list to work off. It may become shorter."""
    lab, batch = make("qwen3_moe", late_device), make_batch(20, 11)
    session = lab.session()
    lab.forward_backward(session, batch)
    lab.step(session)
    with backend.counted_waits() as waits:
        lab.forward_backward(session, batch)
        lab.step(session)
    print(waits)
    assert sum(waits.values()) <= MOST_WAITS, waits
