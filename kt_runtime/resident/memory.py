"""This process's memory: how much it takes, as the kernel counts it, and what becomes of what was freed."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from kt_runtime.errors import ConflictError, RuntimeFault

# mallopt(3). Larger thresholds for mmap are refused: 32 MiB is glibc's HEAP_MAX_SIZE / 2 on 64-bit machines.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 << 20
_KEPT_BYTES = 1 << 30


def resident_set_bytes() -> int:
    """Resident set size of this process (proc(5), /proc/self/statm, second field)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """What the system can give without swapping (`proc_meminfo(5)`, MemAvailable)."""
    for line in meminfo.read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeFault(f"{meminfo} has no line MemAvailable")


def check_available(needed: int, what: str, hint: str = "") -> None:
    """Raises ConflictError, beginning with `what`, unless so many bytes are available."""
    available = available_bytes()
    if needed > available:
        raise ConflictError(f"{what} needs {needed} bytes of memory, {available} are available{hint}")


def keep_freed_memory() -> bool:
    """Lets the C library keep freed memory for the next allocation, up to 1 GiB, until `give_back_freed_memory`.

    Training on a CPU allocates and frees tensors of some megabytes all the time. By default each is mapped, its pages
    are cleared at their first use, and it is unmapped: 6 to 8 % of a step. False where the C library is not glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)) and bool(mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES))


def give_back_freed_memory() -> None:
    """Returns freed memory to the system (malloc_trim(3)). Nothing where the C library is not glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
