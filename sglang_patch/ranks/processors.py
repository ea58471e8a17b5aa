"""Each rank has processors of its own.

Symbol (SGLang 0.5.23): `distributed.bootstrap._bind_threads_if_cpu`, called before the ranks are connected, and before
this process has threads. Reason: SGLang wants a memory node for each rank, and binds nothing without its kernel
library. The expert pool pins its threads to the first processors of the process, which would be those of all ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kt_runtime.sglang_patch.hooks import Hooks

SYMBOLS = ("sglang.srt.distributed.bootstrap._bind_threads_if_cpu", "sglang.srt.runtime_context.get_parallel")
TOPOLOGY = Path("/sys/devices/system/cpu")


def install(hooks: Hooks) -> None:
    if hooks.on_cpu:
        hooks.around(SYMBOLS[0], bind_rank)


def bind_rank(original: Callable[..., Any], *, device: str) -> Any:
    from sglang.srt.runtime_context import get_parallel

    if int(get_parallel().tp_size) == 1:
        return original(device=device)
    ranks = int(get_parallel().tp_size) // int(get_parallel().nnodes)  # of this host
    cores = cores_of(sorted(os.sched_getaffinity(0)))
    os.sched_setaffinity(0, processors_of(cores, int(get_parallel().tp_rank) % ranks, ranks))
    return None


def processors_of(cores: Sequence[Sequence[int]], rank: int, num_ranks: int) -> list[int]:
    """A consecutive part of the cores; all of them if there are fewer than ranks."""
    count = len(cores)
    own = cores[count * rank // num_ranks : count * (rank + 1) // num_ranks] if count >= num_ranks else cores
    return [processor for core in own for processor in core]


def cores_of(processors: Sequence[int], topology: Path = TOPOLOGY) -> list[list[int]]:
    """The processors of each physical core, in the order of memory nodes, packages and cores: with as many ranks as
    nodes each rank has a node. A processor of which the system says nothing is a core."""
    found: dict[tuple[int, int, int], list[int]] = {}
    for processor in processors:
        found.setdefault(_place(topology / f"cpu{processor}", processor), []).append(processor)
    return [found[place] for place in sorted(found)]


def _place(directory: Path, processor: int) -> tuple[int, int, int]:
    """(memory node, package, core). `directory`: the system's about the processor."""
    node = min((int(each.name[4:]) for each in directory.glob("node[0-9]*")), default=-1)
    try:
        package, core = (
            int((directory / "topology" / name).read_text()) for name in ("physical_package_id", "core_id")
        )
    except (OSError, ValueError):
        return (node, -1, processor)
    return (node, package, core)
