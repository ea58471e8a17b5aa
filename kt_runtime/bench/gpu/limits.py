"""What the machine and its accelerator allow, measured in the run whose rows are compared with it.

    dram               the CPU's reads from memory (`bench.experts.limits`)
    cpu_arithmetic     the CPU's bf16 multiply instructions (same place)
    to_device          copies from pinned host memory to the device: PCIe, one direction
    to_host            copies from the device to pinned host memory
    device_memory      bytes read and written by a copy on the device
    device_arithmetic  operations of a bf16 matrix product, two for a multiply-add

Each rate is the best of several passes: other work on the machine can only slow a pass down. All work goes through
`kt_runtime.device`, and runs on the host, too: there the copies are the host's own, and the tests' figures.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch

from kt_runtime.bench.experts.limits import measure_limits, memory_reader
from kt_runtime.device import is_host, pinned, recorded
from kt_runtime.experts.machine import default_threads
from kt_runtime.experts.native import resolve_isa

PASSES = 5


@dataclass(frozen=True)
class Sizes:
    """`copy_bytes`: of a copy between host and device. `device_bytes`: of a copy on the device, which reads and writes
    as many. `side`: of the square matrices. `calls`: in a pass."""

    copy_bytes: int = 256 << 20
    device_bytes: int = 1 << 30
    side: int = 8192
    calls: int = 8


@dataclass(frozen=True)
class GpuLimits:
    """Bytes and operations per second; the module's head says of what."""

    dram: float
    cpu_arithmetic: float
    to_device: float
    to_host: float
    device_memory: float
    device_arithmetic: float

    def or_better(self, other: GpuLimits) -> GpuLimits:
        """The higher rate of both, of each kind."""
        return replace(self, **{name: max(rate, getattr(other, name)) for name, rate in asdict(self).items()})


def measure_gpu_limits(device: torch.device, sizes: Sizes | None = None) -> GpuLimits:
    """`sizes`: None: large enough for an accelerator, within half of its free memory. A pass takes some 10 ms there."""
    sizes = sizes or Sizes()
    cpu = measure_limits(resolve_isa(None), default_threads(), memory_reader())
    return GpuLimits(
        dram=cpu.dram_bytes_per_s,
        cpu_arithmetic=cpu.bf16_flops,
        to_device=_copy_rate(device, sizes, to_device=True),
        to_host=_copy_rate(device, sizes, to_device=False),
        device_memory=_memory_rate(device, sizes),
        device_arithmetic=_product_rate(device, sizes),
    )


def _copy_rate(device: torch.device, sizes: Sizes, *, to_device: bool) -> float:
    host = pinned(sizes.copy_bytes).zero_()
    there = torch.zeros(sizes.copy_bytes, dtype=torch.uint8, device=device)
    into, source = (there, host) if to_device else (host, there)
    return sizes.copy_bytes * _calls_per_s(lambda: into.copy_(source, non_blocking=True), device, sizes.calls)


def _memory_rate(device: torch.device, sizes: Sizes) -> float:
    source = torch.zeros(sizes.device_bytes, dtype=torch.uint8, device=device)
    into = torch.empty_like(source)
    return 2 * sizes.device_bytes * _calls_per_s(lambda: into.copy_(source), device, sizes.calls)


def _product_rate(device: torch.device, sizes: Sizes) -> float:
    a, b = (torch.ones(sizes.side, sizes.side, dtype=torch.bfloat16, device=device) for _ in range(2))
    out = torch.empty_like(a)
    return 2.0 * sizes.side**3 * _calls_per_s(lambda: torch.mm(a, b, out=out), device, sizes.calls)


def _calls_per_s(call: Callable[[], object], device: torch.device, calls: int) -> float:
    """The best of PASSES passes of `calls` calls, each pass awaited once at its end; after one uncounted pass."""
    best = 0.0
    for number in range(1 + PASSES):
        started = time.perf_counter()
        for _ in range(calls):
            call()
        if not is_host(device):
            recorded(device=device).synchronize()
        if number:
            best = max(best, calls / (time.perf_counter() - started))
    return best
