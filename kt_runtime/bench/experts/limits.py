"""The machine's limits, measured in the same run, and the least time that a case needs at these limits.

limit_ratio of a row = time at the limits / measured time. Time at the limits is the longer of
  bytes of the experts that the batch touches / DRAM read bandwidth
  operations / peak of the multiply instruction of the format's path, two operations for a multiply-add.

The read bandwidth of rented machines changes within seconds. So the bandwidth of a row is measured between its calls.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from kt_runtime.experts import machine
from kt_runtime.serve.memory.machine import available_cpu_bytes

LEAST_READ_BUFFER_BYTES = 512 << 20
LARGEST_READ_BUFFER_BYTES = 4 << 30
READ_PASSES = 24
PEAK_PASSES = machine.PEAK_PASSES
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")

DRAM = "dram"
# In units of forward's operations. Backward multiplies the gradients of gate, up and down by their matrices, as many
# operations as forward. Recomputing activations that were not retained costs gate and up once more.
BACKWARD = 1.0
RECOMPUTED = 2 / 3


@dataclass(frozen=True)
class Limits:
    isa: str
    threads: int
    dram_bytes_per_s: float
    bf16_flops: float
    int8_ops: float

    def peak(self, path: str) -> float:
        return {"bf16": self.bf16_flops, "int8": self.int8_ops}[path]

    def or_better(self, other: Limits) -> Limits:
        """The higher rate of both, of each kind: other load on the machine can only lower a rate."""
        rates = ("dram_bytes_per_s", "bf16_flops", "int8_ops")
        return replace(self, **{rate: max(getattr(self, rate), getattr(other, rate)) for rate in rates})


@dataclass(frozen=True)
class Work:
    """The least work of a call: bytes read and operations."""

    weight_bytes: float
    operations: dict[str, float]  # by path: "bf16", "int8"

    def limit(self, limits: Limits) -> tuple[float, str]:
        """(seconds at the limits, the bottleneck: "dram", or the path that takes longest)."""
        seconds = {path: count / limits.peak(path) for path, count in self.operations.items()}
        reading = self.weight_bytes / limits.dram_bytes_per_s
        if reading >= sum(seconds.values()):
            return reading, DRAM
        return sum(seconds.values()), max(seconds, key=lambda path: seconds[path])


def forward_work(touched_bytes: float, operations: float, path: str) -> Work:
    return Work(touched_bytes, {path: operations})


def training_work(touched_bytes: float, operations: float, path: str, recomputed: bool) -> Work:
    """The work of forward and backward; `operations` and `touched_bytes` are those of forward.

    Gradients are not quantized, so backward's operations count against the bf16 peak in every format.
    """
    forwards = 1 + (RECOMPUTED if recomputed else 0)
    counts = {"bf16": BACKWARD * operations}
    counts[path] = counts.get(path, 0) + forwards * operations
    return Work((forwards + BACKWARD) * touched_bytes, counts)


def measure_limits(isa: str, threads: int, reader: machine.MemoryReader) -> Limits:
    """The best of many short passes: other processes can only slow a pass down."""
    return Limits(
        isa,
        threads,
        max(reader.rate(isa, threads) for _ in range(READ_PASSES)),
        machine.peak_rate(isa, "bf16", threads, PEAK_PASSES),
        machine.peak_rate(isa, "int8", threads, PEAK_PASSES),
    )


def memory_reader() -> machine.MemoryReader:
    """Over four last-level caches where the free memory allows it, so that a pass replaces what a cache held."""
    wanted = max(LEAST_READ_BUFFER_BYTES, 4 * last_level_cache_bytes())
    return machine.MemoryReader(min(wanted, LARGEST_READ_BUFFER_BYTES, available_cpu_bytes() // 4))


def last_level_cache_bytes() -> int:
    """Bytes of processor 0's largest cache; 0 if the system does not report it."""
    sizes = [0]
    for file in CACHES.glob("index*/size"):
        text = file.read_text().strip()
        unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
        sizes.append(int(text.rstrip("KMG")) * unit)
    return max(sizes)
