"""This machine's free memory: on the CPU within the control group's limit, and on the GPU."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

HOST = "cpu"  # the name of the device without a GPU
CGROUP = Path("/sys/fs/cgroup")
NO_LIMIT_BYTES = 2**60
# Device files of NVIDIA's driver, AMD's driver and WSL. Without any of them torch finds no GPU; asking torch itself
# would cost seconds for its import.
GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


def has_gpu() -> bool:
    """Whether torch finds a GPU, or another accelerator, for attention and dense layers."""
    if "torch" not in sys.modules and not _has_driver() and not _has_backend():
        return False
    from kt_runtime import device

    return device.accelerator() is not None


def gpu_index(device: str) -> int:
    return int(device.partition(":")[2] or 0)


def has_graphs() -> bool:
    """Whether SGLang captures graphs on the accelerator: its graphs are CUDA's."""
    from kt_runtime import device

    return device.has_cuda()


def gpu_problem() -> str:
    """Why torch can't use this machine's NVIDIA GPU; "" if it can, or if there is none (`device.problem`)."""
    if not _has_driver():
        return ""
    from kt_runtime import device

    return device.problem()


def gpus_are_hidden() -> bool:
    """Does the environment hide this machine's GPUs from torch?"""
    if not _has_driver():
        return False
    from kt_runtime import device

    return device.are_hidden()


def _has_driver() -> bool:
    return any(Path(device).exists() for device in GPU_DEVICES)


def _has_backend() -> bool:
    """Is a package installed that gives torch another kind of accelerator?"""
    return bool(importlib.metadata.entry_points(group="torch.backends"))


def available_memory(with_gpu: bool, index: int = 0) -> dict[str, int]:
    """Free bytes by device. `index`: of the GPU that counts, since the single rank uses one."""
    free = {"cpu": available_cpu_bytes()}
    if with_gpu:
        from kt_runtime import device

        free["gpu"] = device.facts(index).free_bytes
    return free


def total_cpu_bytes() -> int:
    return psutil.virtual_memory().total


def available_cpu_bytes(cgroup: Path = CGROUP) -> int:
    """The kernel's MemAvailable, or less if a control group (a container's limit) leaves less."""
    return max(0, min([psutil.virtual_memory().available, *_left_in_groups(cgroup)]))


def huge_pages() -> dict[str, int]:
    """Bytes of reserved huge pages, total and free. psutil does not report them."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    info = {name: int(number) for name, number, *_ in lines}
    size_bytes = info.get("Hugepagesize:", 0) * 1024
    return {
        "total_bytes": info.get("HugePages_Total:", 0) * size_bytes,
        "free_bytes": info.get("HugePages_Free:", 0) * size_bytes,
    }


def _left_in_groups(root: Path) -> Iterator[int]:
    """Free bytes of each enclosing control group, version 2, then version 1. Page cache counts as free."""
    for line in _read_text(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            names = ("memory.max", "memory.current", "inactive_file")
            group_root = root
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            group_root = root / "memory"
        else:
            continue
        group = group_root / path.lstrip("/")
        while True:
            left = _left_in_group(group, *names)
            if left is not None:
                yield left
            if group == group_root or group_root not in group.parents:
                break
            group = group.parent


def _left_in_group(group: Path, limit_name: str, usage_name: str, cache_name: str) -> int | None:
    limit, usage = _read_text(group / limit_name).strip(), _read_text(group / usage_name).strip()
    if not limit.isdecimal() or not usage.isdecimal() or int(limit) >= NO_LIMIT_BYTES:
        return None
    statistics = dict(line.split(None, 1) for line in _read_text(group / "memory.stat").splitlines() if " " in line)
    return int(limit) - int(usage) + int(statistics.get(cache_name, 0))


def _read_text(path: Path) -> str:
    """The file's text; empty for a missing file, since control group files differ between kernels."""
    try:
        return path.read_text()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return ""
