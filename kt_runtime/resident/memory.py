"""This process's memory: its size according to the kernel, and the allocator's handling of freed memory."""

from __future__ import annotations

import ctypes

import psutil

from kt_runtime.errors import ConflictError

# mallopt(3). Larger thresholds for mmap are refused: 32 MiB is glibc's HEAP_MAX_SIZE / 2 on 64-bit machines.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 << 20
_KEPT_BYTES = 1 << 30
_LIBC = ctypes.CDLL(None)


def resident_set_bytes() -> int:
    """Resident set size of this process."""
    return psutil.Process().memory_info().rss


def available_bytes() -> int:
    """Bytes that the system can allocate without swapping (`proc_meminfo(5)`, MemAvailable)."""
    return psutil.virtual_memory().available


def check_available(needed: int, what: str, hint: str = "") -> None:
    """Raises ConflictError, whose message begins with `what`, unless `needed` bytes are available."""
    available = available_bytes()
    if needed > available:
        raise ConflictError(f"{what} needs {needed} bytes of memory, {available} are available{hint}")


def keep_freed_memory() -> bool:
    """Makes the C library keep up to 1 GiB of freed memory for reuse, until `return_freed_memory`.

    Training on a CPU constantly allocates and frees tensors of some megabytes. By default glibc maps and unmaps each
    one, and the kernel clears its pages at first use: 6 to 8 % of a step. Returns False if the C library is not glibc.
    """
    mallopt = getattr(_LIBC, "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)) and bool(mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES))


def return_freed_memory() -> None:
    """Returns freed memory to the system (malloc_trim(3)). No effect if the C library is not glibc."""
    trim = getattr(_LIBC, "malloc_trim", None)
    if trim is not None:
        trim(0)
