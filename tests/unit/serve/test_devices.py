"""Which device a server computes on, on machines that are invented."""

from __future__ import annotations

import pytest
import torch
from click.testing import CliRunner

from kt_runtime import device
from kt_runtime.cli.main import main
from kt_runtime.cli.serve import command
from kt_runtime.cli.server_process import free_port
from kt_runtime.device import DeviceFacts
from kt_runtime.errors import ConflictError, InvalidValueError, KtError, UnknownNameError
from kt_runtime.serve import devices
from kt_runtime.serve.devices import chosen_device, describe

TOO_OLD = "the NVIDIA driver 470.82.01 is loaded, but PyTorch can't use a GPU: too old; CUDA 13.0 needs driver 580"


def machine(monkeypatch: pytest.MonkeyPatch, num_gpus: int, problem: str = "") -> None:
    found = [DeviceFacts(f"GPU number {index}", index, 20, 24, "580.65.06") for index in range(num_gpus)]
    monkeypatch.setattr(device, "accelerator", lambda: torch.device("cuda") if found else None)
    monkeypatch.setattr(device, "count", lambda: len(found))
    monkeypatch.setattr(device, "facts", found.__getitem__)
    for name, value in (("has_gpu", bool(found)), ("gpu_problem", problem), ("gpus_are_hidden", False)):
        monkeypatch.setattr(devices, name, lambda value=value: value)


@pytest.mark.parametrize(
    ("num_gpus", "asked", "chosen"),
    [
        *((0, None, "cpu"), (0, "cpu", "cpu")),
        *((1, None, "cuda:0"), (1, "cuda", "cuda:0"), (1, "cpu", "cpu")),
        *((2, None, "cuda:0"), (2, "cuda:1", "cuda:1"), (2, "cuda:0", "cuda:0")),
    ],
)
def test_a_device_is_the_named_one_or_the_first_gpu(
    num_gpus: int, asked: str | None, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, num_gpus)
    assert chosen_device(asked) == chosen


@pytest.mark.parametrize(
    ("num_gpus", "asked", "kind", "message"),
    [
        (2, "cuda:2", UnknownNameError, "--device: unknown device 'cuda:2'; did you mean 'cuda:1'?"),
        (2, "cdua:1", UnknownNameError, "did you mean 'cuda:1'? known: cpu, cuda, cuda:0, cuda:1"),
        (1, "gpu", UnknownNameError, "unknown device 'gpu'; did you mean 'cpu'? known: cpu, cuda, cuda:0"),
        (0, "cudo:0", UnknownNameError, "unknown device 'cudo:0'; did you mean 'cuda'? known: cpu, cuda"),
        (0, "cuda", InvalidValueError, "--device cuda: PyTorch finds no GPU on this machine"),
        (0, "cuda:1", InvalidValueError, "--device cuda:1: PyTorch finds no GPU on this machine"),
    ],
)
def test_a_device_that_is_not_there_is_refused_with_those_that_are(
    num_gpus: int, asked: str, kind: type[KtError], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, num_gpus)
    with pytest.raises(kind) as refused:
        chosen_device(asked)
    assert message in str(refused.value) and refused.value.exit_status == 2


@pytest.mark.parametrize("asked", [None, "cuda", "cuda:1"])
def test_a_gpu_that_can_not_be_used_is_not_replaced_by_the_cpu(
    asked: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, 0, problem=TOO_OLD)
    with pytest.raises(ConflictError) as refused:
        chosen_device(asked)
    assert str(refused.value) == f"{TOO_OLD}. `--device cpu` computes on the CPU"
    assert refused.value.exit_status == 2
    assert chosen_device("cpu") == "cpu"


def test_the_command_ends_with_status_2_before_it_looks_for_the_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine(monkeypatch, 0, problem=TOO_OLD)
    assert main(["serve", "--model", "no-such-model", "--port", str(free_port())]) == 2
    assert TOO_OLD in capsys.readouterr().err
    machine(monkeypatch, 1)
    asked = ["--model", "no-such-model", "--port", str(free_port()), "--device", "cuda:9"]
    assert isinstance(CliRunner().invoke(command, asked, standalone_mode=False).exception, UnknownNameError)


def test_a_gpu_is_described_and_so_is_a_cpu_that_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 2)
    assert list(describe("cuda:1", None)) == ["device: cuda:1, GPU number 1, driver 580.65.06"]
    assert list(describe("cpu", "cpu")) == ["device: the CPU, as --device says"]
    machine(monkeypatch, 0)
    assert list(describe("cpu", None)) == []
    monkeypatch.setattr(devices, "gpus_are_hidden", lambda: True)
    assert list(describe("cpu", None)) == ["device: the CPU, since the environment hides every GPU"]
