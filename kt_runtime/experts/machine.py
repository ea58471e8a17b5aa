"""This machine's processors, memory nodes and measured peak rates (csrc/kernels/peaks.h)."""

from __future__ import annotations

import errno
import os
from contextlib import AbstractContextManager
from dataclasses import dataclass

from kt_runtime import _experts
from kt_runtime.experts.native import resolve_isa, translated_errors

PEAK_PASSES = 60


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


def pool_processor() -> int | None:
    """The processor that the pool's workers leave to the thread that calls them (csrc/threads/topology.h, `seat_of`).
    None: there are no workers."""
    return memory_nodes()[0].processors[0] if default_threads() > 1 else None


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


class MemoryReader:
    """Measures how fast the engine's threads read memory now, again and again.

    A buffer of `buffer_bytes` is read a quarter at a time, `bytes_at_once`. A cache smaller than three quarters holds
    nothing of the part that is read, and one smaller than a quarter nothing that was read before a pass.
    InvalidValueError if the buffer is too small.
    """

    def __init__(self, buffer_bytes: int) -> None:
        with translated_errors():
            self._native = _experts.MemoryReader(buffer_bytes)
        self.bytes_at_once: int = self._native.bytes_at_once

    def rate(self, isa: str, num_threads: int) -> float:
        """Bytes per second of the next quarter, with the widest loads of `isa`. UnknownNameError for one that is not
        available."""
        isa = resolve_isa(isa)
        with translated_errors():
            return self._native.rate(isa, num_threads)


def take_engine_seconds() -> float:
    """Seconds of this thread's calls on experts since it was last asked, without Python and the checks of arguments."""
    return _experts.take_engine_seconds()


def workers_awake() -> AbstractContextManager[None]:
    """Within it, the engine's threads spin between calls instead of sleeping: as between the layers of a step."""
    return _experts.WorkersAwake()


def peak_rate(isa: str, operation: str, num_threads: int, passes: int = PEAK_PASSES) -> float:
    """Operations per second (a multiply-add counts as two) of the instructions that the kernels of `isa` use.

    operation: "bf16" for bf16 and fp8 weights, "int8" for integer weights. passes: their number; each takes about 5 ms,
    and the best counts.
    """
    isa = resolve_isa(isa)
    with translated_errors():
        return _experts.measure_peak(isa, operation, num_threads, passes)
