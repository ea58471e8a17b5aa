"""This machine's processors, memory nodes and measured peak rates (csrc/kernels/peaks.h)."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

from kt_runtime import _experts
from kt_runtime.experts.native import resolve_isa, translated_errors


@dataclass(frozen=True)
class MemoryNode:
    """`number`: the operating system's id of the NUMA node. `processors`: those that this process may run on.
    `threads`: expert threads on this node."""

    number: int
    processors: tuple[int, ...]
    threads: int


def usable_processors() -> int:
    """Number of processors that this process may run on."""
    return sum(len(node.processors) for node in memory_nodes())


def default_threads() -> int:
    """One thread per physical core that this process may run on, at most its cgroups' CPU quota, rounded up."""
    return _experts.default_num_threads()


def memory_nodes(num_threads: int | None = None) -> list[MemoryNode]:
    """The memory nodes that have processors for this process. num_threads: None means `default_threads()`."""
    found = _experts.memory_nodes(default_threads() if num_threads is None else num_threads)
    return [MemoryNode(number, tuple(processors), threads) for number, processors, threads in found]


def placement_refusal(*, probe: bool = False) -> str | None:
    """Why the system did not place weights on their intended memory node; None: it never refused.

    probe: try now, with one page on each node. Else: the outcome of all placements since the process began.
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
    """Bytes per second that all threads together read from a buffer; the best of many passes. Takes at most a second.

    The buffer must be much larger than the caches: each pass reads an eighth of it. InvalidValueError if it is too
    small; UnknownNameError for an instruction set that is not available.
    """
    isa = resolve_isa(isa)
    with translated_errors():
        return _experts.measure_read(isa, num_threads, buffer_bytes)


def peak_rate(isa: str, operation: str, num_threads: int) -> float:
    """Operations per second (a multiply-add counts as two) of the instructions that the kernels of `isa` use.

    operation: "bf16" for bf16 and fp8 weights, "int8" for integer weights.
    """
    isa = resolve_isa(isa)
    with translated_errors():
        return _experts.measure_peak(isa, operation, num_threads)
