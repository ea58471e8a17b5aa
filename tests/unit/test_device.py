"""What `kt_runtime/device.py` answers on the host and for invented accelerators."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kt_runtime import device
from kt_runtime.errors import InvalidValueError

HOST = torch.device("cpu")
WITHOUT = pytest.mark.skipif(torch.accelerator.is_available(), reason="states what holds without an accelerator")


class RecordedEvent:
    """Counts how often it is waited for."""

    def __init__(self) -> None:
        self.waits = 0

    def synchronize(self) -> None:
        self.waits += 1


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """An accelerator of kind "cuda" with two devices of 24 and 80 GB, as PyTorch would report it."""
    memory = {0: (20_000, 24_000), 1: (70_000, 80_000)}
    names = SimpleNamespace(get_device_name=lambda index: f"GPU number {index}")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda where: memory[where.index])
    monkeypatch.setattr(torch, "get_device_module", lambda kind: names)


def test_memory_of_the_host_is_told_from_a_devices() -> None:
    assert device.is_host(HOST) and device.is_host(torch.zeros(1))
    assert not device.is_host(torch.device("cuda:1")) and not device.is_host(torch.zeros(1, device="meta"))


@WITHOUT
def test_without_an_accelerator_there_are_no_devices_and_pinned_memory_is_ordinary() -> None:
    assert device.accelerator() is None and device.devices() == [] and not device.has_cuda()
    memory = device.pinned(7)
    assert (memory.shape, memory.dtype, memory.device) == ((7,), torch.uint8, HOST)


def test_the_host_needs_no_guard_and_captures_nothing() -> None:
    with device.guard(HOST):
        assert not device.is_capturing(HOST)


def test_a_buffer_grows_and_is_used_again() -> None:
    buffer = device.PinnedBuffer()
    small = buffer.shaped((2, 3), torch.float32)
    large = buffer.like(torch.zeros(5, 4, dtype=torch.bfloat16))
    assert (small.shape, small.dtype) == ((2, 3), torch.float32)
    assert (large.shape, large.dtype, large.is_contiguous()) == ((5, 4), torch.bfloat16, True)
    assert buffer.shaped((4,), torch.int64).data_ptr() == large.data_ptr() != small.data_ptr()


def test_a_buffer_waits_once_for_the_last_copy_out_of_it() -> None:
    buffer, event = device.PinnedBuffer(), RecordedEvent()
    buffer.shaped((1,), torch.float32)
    buffer.busy_until(event)  # type: ignore[arg-type]
    assert event.waits == 0
    buffer.shaped((1,), torch.float32)
    buffer.shaped((1,), torch.float32)
    assert event.waits == 1


def test_random_numbers_inside_leave_those_outside_as_they_were() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with device.forked_randomness(HOST):
        torch.rand(5)
    assert torch.equal(torch.rand(2), expected)


def test_every_device_is_listed_with_its_memory(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "driver_version", lambda: "580.65.06")
    assert device.devices() == [
        device.DeviceFacts("GPU number 0", 0, 20_000, 24_000, "580.65.06"),
        device.DeviceFacts("GPU number 1", 1, 70_000, 80_000, "580.65.06"),
    ]


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 2024\nGCC version:  gcc 12",
            "535.183.01",
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build", "580.65.06"),
        ("something else\n", ""),
    ],
)
def test_the_drivers_version_is_read_from_the_kernel(
    text: str, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version").write_text(text)
    monkeypatch.setattr(device, "_DRIVER_FILE", tmp_path / "version")
    assert device.driver_version() == version


def test_without_a_driver_its_version_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_DRIVER_FILE", tmp_path / "version")
    assert device.driver_version() == ""


@pytest.fixture
def broken_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA's driver is loaded, in a version that PyTorch's CUDA refuses."""
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.82.01  Wed Oct 27\n")

    def refuse() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040). Please update it.\nMore")

    monkeypatch.setattr(device, "_DRIVER_FILE", tmp_path / "version")
    monkeypatch.setattr(device, "CONTROL_FILE", tmp_path)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    monkeypatch.setattr(torch.cuda, "init", refuse)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_a_driver_that_is_too_old_is_told_with_what_is_needed(broken_driver: None) -> None:
    assert device.problem() == (
        f"the NVIDIA driver 470.82.01 is loaded, but PyTorch {torch.__version__} can't use a GPU: The NVIDIA driver on "
        "your system is too old (found version 11040); CUDA 13.0 needs driver 580 or newer"
    )


def test_a_pytorch_without_cuda_is_told(broken_driver: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert device.problem().endswith("can't use a GPU: this PyTorch is built without CUDA")


@pytest.mark.parametrize(("name", "value"), [("CUDA_VISIBLE_DEVICES", ""), ("CUDA_VISIBLE_DEVICES", "-1")])
def test_hidden_gpus_are_no_problem(
    broken_driver: None, name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    assert device.problem() == "" and device.are_hidden()


def test_no_driver_is_no_problem(broken_driver: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "CONTROL_FILE", tmp_path / "nvidiactl")
    assert device.problem() == ""


def test_hidden_accelerators_are_found_neither_here_nor_by_what_is_started(
    two_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("KT_RUNTIME_DEVICE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "all")  # so that both are restored
    assert device.accelerator() == torch.device("cuda") and not device.are_hidden()
    device.hide_accelerators()
    assert device.accelerator() is None and device.devices() == [] and device.are_hidden()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_a_failed_device_is_told_from_a_full_one() -> None:
    assert device.is_lost(torch.AcceleratorError("CUDA error: unspecified launch failure"))
    assert not device.is_lost(torch.OutOfMemoryError("CUDA out of memory"))
    assert not device.is_lost(RuntimeError("shape"))


def test_only_the_device_that_is_asked_for_is_touched(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA context takes hundreds of megabytes of a GPU that another server may use."""
    touched: list[int] = []

    def memory_of(where: torch.device) -> tuple[int, int]:
        touched.append(where.index)
        return 3, 4

    monkeypatch.setattr(torch.accelerator, "get_memory_info", memory_of)
    assert device.count() == 2 and device.facts(1).free_bytes == 3
    assert touched == [1]


@WITHOUT
def test_facts_of_no_accelerator_are_refused() -> None:
    assert device.count() == 0
    with pytest.raises(InvalidValueError, match="device 0: this process has no accelerator"):
        device.facts(0)
