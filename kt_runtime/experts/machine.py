"""What the experts find on this machine: processors, memory nodes, the most that it can do (csrc/kernels/peaks.h)."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

from kt_runtime import _experts
from kt_runtime.experts.native import resolve_isa, translated_errors


@dataclass(frozen=True)
class MemoryNode:
    """`number`: the operating system's. `processors`: that this process may run on. `threads`: of the experts there."""

    number: int
    processors: tuple[int, ...]
    threads: int


def usable_processors() -> int:
    """That this process may run on."""
    return sum(len(node.processors) for node in memory_nodes())


def default_threads() -> int:
    """A thread for each physical core that this process may run on, at most its cgroups' CPU quota, rounded up."""
    return _experts.default_num_threads()


def memory_nodes(num_threads: int | None = None) -> list[MemoryNode]:
    """Those with processors for this process. num_threads: None for `default_threads`."""
    found = _experts.memory_nodes(default_threads() if num_threads is None else num_threads)
    return [MemoryNode(number, tuple(processors), threads) for number, processors, threads in found]


def placement_refusal(*, probe: bool = False) -> str | None:
    """Why the system did not place weights on the memory node that they were meant for; None: it never refused.

    probe: ask now, for one page on each node; else what became of the requests since the process began.
    """
    if probe:
        errors = [error for node in memory_nodes() if (error := _experts.probe_placement(node.number))]
        refused, last = len(errors), errors[-1] if errors else 0
    else:
        _, refused, last = _experts.placement_counts()
    if refused == 0:
        return None
    name = errno.errorcode.get(last, "unknown")
    return (
        f"mbind was refused {refused} times, at last with errno {last} ({name}: {os.strerror(last)}): a page lies"
        " where the thread that packed it ran; containers need CAP_SYS_NICE or a seccomp profile that allows mbind"
    )


def read_rate(isa: str, num_threads: int, buffer_bytes: int) -> float:
    """Bytes a second that the threads read together from a buffer; the best of many passes. Takes a second or less.

    It must be much larger than the caches: each pass reads an eighth of it. InvalidValueError where it is too small;
    UnknownNameError for an instruction set that is not available.
    """
    isa = resolve_isa(isa)
    with translated_errors():
        return _experts.measure_read(isa, num_threads, buffer_bytes)


def peak_rate(isa: str, operation: str, num_threads: int) -> float:
    """Operations a second, two for a multiply-add, of the arithmetic that the kernels of `isa` rest on.

    operation: "bf16" for bf16 and fp8 weights, "int8" for integer weights.
    """
    isa = resolve_isa(isa)
    with translated_errors():
        return _experts.measure_peak(isa, operation, num_threads)
