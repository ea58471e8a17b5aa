"""The device that a server computes on: the one that `--device` names, or what this machine has.

A device is "cpu", or the kind of an accelerator with an index, such as "cuda:1". The CPU is never taken in place of a
GPU that can't be used: it is taken where it is named, and where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kt_runtime.errors import ConflictError, InvalidValueError, UnknownNameError
from kt_runtime.serve.memory.machine import HOST, gpu_index, gpu_problem, gpus_are_hidden, has_gpu

if TYPE_CHECKING:
    from kt_runtime.device import DeviceFacts

NVIDIA = "cuda"


def chosen_device(asked: str | None) -> str:
    """`asked`: "cpu", "cuda" (the first GPU), "cuda:1"; None: a GPU if there is one.

    Raises UnknownNameError for a name that is no device or a GPU that is not there, ConflictError for a GPU whose
    driver PyTorch can't use, InvalidValueError for a GPU where there is none.
    """
    if asked == HOST:
        return HOST
    kind, number = _accelerators()
    first, names = kind or NVIDIA, [f"{kind}:{index}" for index in range(number)]
    if asked is not None and asked != first and asked not in names:
        _check_name(asked, first, names)
    if kind:
        return names[0] if asked in (None, kind) else str(asked)
    if problem := gpu_problem():
        raise ConflictError(f"{problem}. `--device cpu` computes on the CPU")
    if asked is not None:
        raise InvalidValueError(f"--device {asked}: PyTorch finds no GPU on this machine; leave it out, or name cpu")
    return HOST


def count() -> int:
    """Accelerators that this process may use."""
    return _accelerators()[1]


def describe(device: str, asked: str | None) -> Iterator[str]:
    """A line for the chosen device; none for a CPU by default, on a machine without a GPU."""
    if device != HOST:
        facts = _facts(gpu_index(device))
        driver = f", driver {facts.driver}" if facts.driver else ""
        yield f"device: {device}, {facts.name}{driver}"
    elif asked == HOST:
        yield "device: the CPU, as --device says"
    elif gpus_are_hidden():
        yield "device: the CPU, since the environment hides every GPU"


def use_host_only() -> None:
    """Nothing that this process starts finds a GPU."""
    from kt_runtime import device

    device.hide_accelerators()


def _accelerators() -> tuple[str, int]:
    """The kind of this process's accelerators ("" without any), and their number."""
    if not has_gpu():
        return "", 0
    from kt_runtime import device

    kind = device.accelerator()
    return ("", 0) if kind is None else (kind.type, device.count())


def _facts(index: int) -> DeviceFacts:
    from kt_runtime import device

    return device.facts(index)


def _check_name(asked: str, kind: str, names: list[str]) -> None:
    """Raises UnknownNameError, unless `asked` is well written and there is no GPU at all, which is another mistake."""
    name, _, index = asked.partition(":")
    if names or name != kind or not index.isdecimal():
        raise UnknownNameError("device", asked, [HOST, kind, *names], "--device")
