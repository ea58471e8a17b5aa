"""Where ranks meet: real processes, what listens meanwhile, and how many threads wait for their groups' sockets."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from kt_runtime.sglang_patch.ranks import meeting

SECONDS = 120
CODE = """
import json, os, sys
from datetime import timedelta
from pathlib import Path
import psutil, torch, torch.distributed as dist
from types import SimpleNamespace
from kt_runtime.sglang_patch.ranks import loops, meeting
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
for each in (meeting, loops):
    each.install(SimpleNamespace())
url, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo", init_method=url, rank=rank, world_size=size)
groups = [dist.new_group(backend="gloo", timeout=timedelta(minutes=1 + n)) for n in range(4)]
totals = [torch.tensor([rank + 1.0]) for _ in groups]
for group, total in zip(groups, totals):
    dist.all_reduce(total, group=group)
assert len({total.item() for total in totals}) == 1
threads = [each.read_text() for each in Path("/proc/self/task").glob("*/comm")]
assert sum(each.startswith("gloo_tcp_loop") for each in threads) == 1, threads
assert groups[1]._get_backend(torch.device("cpu")).options._timeout == timedelta(minutes=2)
listens = [each.laddr.ip for each in psutil.Process().net_connections() if each.status == "LISTEN"]
dist.barrier()
print(json.dumps([totals[0].item(), listens]))
"""


def start(url: str, rank: int, size: int, *inherited: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CODE, url, str(rank), str(size)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, pass_fds=inherited, env=dict(os.environ))


def result(process: subprocess.Popen[str]) -> tuple[float, list[str]]:
    said, _ = process.communicate(timeout=SECONDS)
    total, listens = json.loads(said)
    return total, listens


@pytest.mark.slow
def test_one_rank_meets_nobody_and_no_interface_but_loopback_listens() -> None:
    total, listens = result(start(meeting.ALONE, 0, 1))
    assert total == 1.0 and set(listens) <= {"127.0.0.1", "::1"}


@pytest.mark.slow
def test_two_ranks_meet_at_a_socket_that_rank_0_inherited_and_nothing_listens_elsewhere() -> None:
    with socket.create_server(("127.0.0.1", 0)) as opened:
        host, port = opened.getsockname()
        first = start(meeting.at(opened, host, port), 0, 2, opened.fileno())
        second = start(meeting.elsewhere(host, port), 1, 2)
        found = [result(process) for process in (first, second)]
    assert [total for total, _ in found] == [3.0, 3.0]
    assert {address for _, listens in found for address in listens} <= {"127.0.0.1", "::1"}


def test_an_address_of_version_6_is_written_in_brackets() -> None:
    opened = SimpleNamespace(fileno=lambda: 9)
    assert meeting.at(opened, "fd00::1", 7) == "kt-runtime://[fd00::1]:7?fd=9"  # type: ignore[arg-type]
    assert meeting.elsewhere("10.0.0.1", 7) == "kt-runtime://10.0.0.1:7?fd=none"
