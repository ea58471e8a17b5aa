"""The ranks' processes and what each holds, for `/kt/status`.

Symbol (SGLang 0.5.23): `runtime_context.get_parallel`, whose group's processes are asked once when all have loaded,
and once a second while they compute: all ranks take part in the same turn, since rank 0 broadcasts `Ask`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from kt_runtime.sglang_patch.cache import metrics as cache_metrics
from kt_runtime.sglang_patch.ranks import group
from kt_runtime.sglang_patch.store import expert_store
from kt_runtime.wire.status import CacheTier, RankStatus

SYMBOLS = ("sglang.srt.runtime_context.get_parallel",)
ASK_SECONDS = 1.0


class Ask:
    """Sent with SGLang's request broadcast; all ranks then call `Members.tell`."""


@dataclass(frozen=True)
class Member:
    """`experts`: the first of this rank's experts and their number. `dense_bytes`: of SGLang's parameters,
    `expert_bytes`: of the packed experts. `host`: its number, `address`: empty with one host."""

    rank: int
    pid: int
    experts: tuple[int, int]
    dense_bytes: int
    expert_bytes: int
    host: int
    address: str


@dataclass(frozen=True)
class Told:
    """A rank now. `rss_bytes`, `peak_bytes`: of its process. `waited_s`, `sent_bytes`: of its exchange since its start;
    `at_s`: seconds since then. `disk`: its part of the prefix cache's disk tier."""

    rss_bytes: int
    peak_bytes: int
    waited_s: float
    sent_bytes: int
    at_s: float
    disk: CacheTier | None


class Members:
    """All ranks, in order. Every rank creates it and calls `tell` in the same turns. `disk`: this rank's part of the
    prefix cache's disk tier now."""

    def __init__(self, model: Any, address: str, disk: Callable[[], CacheTier | None]) -> None:
        self._disk = disk
        self._members: list[Member] = []
        self._before: list[Told] = []
        self._told: list[Told] = []
        self._began_s = self._asked_s = time.monotonic()
        if group.num_ranks() > 1:
            self._members = _all_ranks(_member(model, address))
            self.tell()
            self._before = self._told

    def is_due(self) -> bool:
        """Whether rank 0 is to broadcast `Ask`: once a second at most."""
        if not self._members or time.monotonic() < self._asked_s + ASK_SECONDS:
            return False
        self._asked_s = time.monotonic()
        return True

    def tell(self) -> None:
        exchange, memory = group.exchange(), _memory_kib()
        assert exchange is not None
        own = Told(
            1024 * memory.get("VmRSS", 0),
            1024 * memory.get("VmHWM", 0),
            exchange.waited_s,
            exchange.sent_bytes,
            time.monotonic() - self._began_s,
            self._disk(),
        )
        self._before, self._told = self._told, _all_ranks(own)
        cache_metrics.told({rank: told.disk for rank, told in enumerate(self._told) if told.disk is not None})

    def statuses(self) -> list[RankStatus]:
        """Each rank's status as it told last, at most a second before the end of the latest work."""
        pairs = list(zip(self._before, self._told, strict=True))
        waited = [(now.waited_s - before.waited_s) / max(1e-9, now.at_s - before.at_s) for before, now in pairs]
        least = min(waited, default=0.0)
        return [
            RankStatus(
                rank=member.rank,
                pid=member.pid,
                first_expert=member.experts[0],
                num_experts=member.experts[1],
                dense_bytes=member.dense_bytes,
                expert_bytes=member.expert_bytes,
                rss_bytes=told.rss_bytes,
                peak_bytes=told.peak_bytes,
                host=member.host,
                address=member.address,
                waiting_share=share,
                sent_bytes=told.sent_bytes,
                is_slowest=share == least and max(waited) > 0,
                disk=told.disk,
            )
            for member, told, share in zip(self._members, self._told, waited, strict=True)
        ]


def _member(model: Any, address: str) -> Member:
    from sglang.srt.runtime_context import get_parallel

    store = expert_store()
    dense_bytes = sum(parameter.nbytes for parameter in model.parameters())
    host = int(get_parallel().node_rank)
    held = (store.first_expert, store.shape.num_experts)
    return Member(group.rank(), os.getpid(), held, dense_bytes, store.resident_bytes, host, address)


def _all_ranks(own: Any) -> list[Any]:
    from sglang.srt.runtime_context import get_parallel

    found: list[Any] = [None] * group.num_ranks()
    dist.all_gather_object(found, own, group=get_parallel().tp_group.cpu_group)
    return found


def _memory_kib() -> dict[str, int]:
    """The sizes in this process's /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = (line.split() for line in lines if line.startswith("Vm"))
    return {name.removesuffix(":"): int(size) for name, size, *_ in fields}
