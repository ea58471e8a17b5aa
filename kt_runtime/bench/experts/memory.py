"""Checks that a shape fits into memory and disk before anything is made, and measures the peak memory of loading."""

from __future__ import annotations

import ctypes
import shutil
import tempfile
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from kt_runtime.bench.experts.plan import BenchFormat, BenchShape
from kt_runtime.errors import InvalidValueError
from kt_runtime.serve.memory.machine import available_cpu_bytes
from kt_runtime.serve.memory.plan import format_bytes

# In units of the layer's bf16 size: the original weights, the packed copy, and temporary memory for loading or for a
# peer's repacking.
COPIES = 3.0
COPIES_WITH_KT_KERNEL = 5.0  # kt-kernel holds up to three copies during loading, besides the original weights
BESIDES_BYTES = 1 << 30  # interpreter, torch, activations, read buffer


def needed_bytes(shape: BenchShape, with_kt_kernel: bool) -> int:
    copies = COPIES_WITH_KT_KERNEL if with_kt_kernel else COPIES
    return int(copies * shape.bf16_bytes) + BESIDES_BYTES


def check_memory(shape: BenchShape, with_kt_kernel: bool) -> None:
    """Raises InvalidValueError with the memory needed and the number of experts that would fit."""
    needed, free = needed_bytes(shape, with_kt_kernel), available_cpu_bytes()
    if needed <= free:
        return
    per_expert = (needed - BESIDES_BYTES) // shape.num_experts
    fitting = max(0, free - BESIDES_BYTES) // per_expert
    hint = f"; --experts {fitting} would fit" if fitting >= shape.top_k else ""
    raise InvalidValueError(
        f"shape {shape.name} with {shape.num_experts} experts needs {format_bytes(needed)} of memory,"
        f" {format_bytes(free)} are free{hint}"
    )


def check_disk(shape: BenchShape, formats: Collection[BenchFormat]) -> None:
    """Raises InvalidValueError if one shape's checkpoints in all encodings do not fit into the temporary directory."""
    encodings = {form.encoding for form in formats}
    needed = sum(shape.bf16_bytes if encoding == "bf16" else shape.bf16_bytes * 5 // 8 for encoding in encodings)
    directory = Path(tempfile.gettempdir())
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise InvalidValueError(
            f"{directory} has {format_bytes(free)} free, the checkpoints of shape {shape.name} need"
            f" {format_bytes(needed)}; set TMPDIR to another directory, or take fewer --experts"
        )


class PeakMemory:
    """`with PeakMemory() as peak: ...; peak.extra_bytes`: the process's peak memory beyond its size at the start.

    None if the system does not let a process reset its own peak (Linux: /proc/self/clear_refs).
    """

    def __enter__(self) -> PeakMemory:
        self.extra_bytes: int | None = None
        with suppress(AttributeError):  # not glibc
            # Returns freed memory to the system; its reuse would not be counted otherwise.
            ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))
        self._was_reset = False
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
            self._was_reset = True
        self._before = _status_bytes("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        if self._was_reset:
            self.extra_bytes = max(0, _status_bytes("VmHWM") - self._before)


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) << 10
    return 0
