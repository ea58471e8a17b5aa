"""The ranks' processes and what each holds, for `/kt/status`.

Symbol (SGLang 0.5.23): `runtime_context.get_parallel`, whose group's processes are asked once, when all have loaded
their weights.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from kt_runtime.sglang_patch.cpu import moe
from kt_runtime.sglang_patch.ranks import group
from kt_runtime.wire.messages import RankStatus

SYMBOLS = ("sglang.srt.runtime_context.get_parallel",)


@dataclass(frozen=True)
class Member:
    """`experts`: the first of this rank's experts and their number. `dense_bytes`: of SGLang's parameters,
    `expert_bytes`: of the packed experts."""

    rank: int
    pid: int
    experts: tuple[int, int]
    dense_bytes: int
    expert_bytes: int

    def status(self) -> RankStatus:
        """With the memory of its process now and at most so far; 0 if it has ended."""
        kib = _memory_kib(self.pid)
        return RankStatus(
            rank=self.rank,
            pid=self.pid,
            first_expert=self.experts[0],
            num_experts=self.experts[1],
            dense_bytes=self.dense_bytes,
            expert_bytes=self.expert_bytes,
            rss_bytes=1024 * kib.get("VmRSS", 0),
            peak_bytes=1024 * kib.get("VmHWM", 0),
        )


def gather(model: Any) -> list[Member]:
    """All ranks, in order, on each of them: every rank must call it. Empty with one rank."""
    if group.num_ranks() == 1:
        return []
    from sglang.srt.runtime_context import get_parallel

    store = moe.expert_store()
    dense_bytes = sum(parameter.nbytes for parameter in model.parameters())
    held = (store.first_expert, store.shape.num_experts)
    found: list[Member | None] = [None] * group.num_ranks()
    own = Member(group.rank(), os.getpid(), held, dense_bytes, store.resident_bytes)
    dist.all_gather_object(found, own, group=get_parallel().tp_group.cpu_group)
    return [member for member in found if member is not None]


def _memory_kib(pid: int) -> dict[str, int]:
    """The sizes in /proc/PID/status, which the ranks of one machine may read of each other."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    fields = (line.split() for line in lines if line.startswith("Vm"))
    return {name.removesuffix(":"): int(size) for name, size, *_ in fields}
