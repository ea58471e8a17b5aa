"""Where ranks meet: real processes, what listens meanwhile, and how many threads wait for their groups' sockets."""

from __future__ import annotations

import multiprocessing
import os
import socket
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from kt_runtime.sglang_patch.ranks import loops, meeting

SECONDS = 120
NUM_GROUPS = 4


def meet(url: str, rank: int, size: int, answer: Connection) -> None:
    """A rank: a fork of the test's process, whose sockets and threads are not counted."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    hooks: Any = SimpleNamespace()
    for each in (meeting, loops):
        each.install(hooks)
    before = listening()
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=size)
    groups = [dist.new_group(backend="gloo", timeout=timedelta(minutes=1 + n)) for n in range(NUM_GROUPS)]
    totals = [torch.tensor([rank + 1.0]) for _ in groups]
    timeouts = []
    for group, total in zip(groups, totals, strict=True):
        assert isinstance(group, dist.ProcessGroup)
        dist.all_reduce(total, group=group)
        timeouts.append(group._get_backend(torch.device("cpu")).options._timeout)
    threads = [each.read_text() for each in Path("/proc/self/task").glob("*/comm")]
    found = ([total.item() for total in totals], timeouts, sum(each.startswith("gloo_tcp_loop") for each in threads))
    answer.send((*found, listening() - before))
    dist.barrier()
    os._exit(0)


def listening() -> set[tuple[str, int]]:
    return {tuple(each.laddr) for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN}


class Rank:
    def __init__(self, url: str, rank: int, size: int) -> None:
        context = multiprocessing.get_context("fork")
        self._answer, theirs = context.Pipe()
        self._process = context.Process(target=meet, args=(url, rank, size, theirs))
        self._process.start()
        theirs.close()

    def addresses(self, total: float) -> set[str]:
        """Where it listens. `total`: what the ranks' sum must be."""
        try:
            assert self._answer.poll(SECONDS), "a rank does not answer"
            totals, timeouts, num_loops, listens = self._answer.recv()
        finally:
            self._process.join(SECONDS)
            self._process.kill()
        assert totals == NUM_GROUPS * [total]
        assert timeouts == [timedelta(minutes=1 + n) for n in range(NUM_GROUPS)]
        assert num_loops == 1
        return {address for address, _ in listens}


@pytest.mark.slow
def test_one_rank_meets_nobody_and_no_interface_but_loopback_listens() -> None:
    assert Rank(meeting.ALONE, 0, 1).addresses(1.0) <= {"127.0.0.1", "::1"}


@pytest.mark.slow
def test_two_ranks_meet_at_a_socket_that_rank_0_inherited_and_nothing_listens_elsewhere() -> None:
    with socket.create_server(("127.0.0.1", 0)) as opened:
        host, port = opened.getsockname()
        ranks = [Rank(meeting.at(opened, host, port), 0, 2), Rank(meeting.elsewhere(host, port), 1, 2)]
        for rank in ranks:
            assert rank.addresses(3.0) <= {"127.0.0.1", "::1"}
