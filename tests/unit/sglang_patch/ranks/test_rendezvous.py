"""Where ranks meet: real processes, and what listens meanwhile."""

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
import psutil, torch, torch.distributed as dist
from types import SimpleNamespace
from kt_runtime.sglang_patch.ranks import meeting
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
meeting.install(SimpleNamespace())
url, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo", init_method=url, rank=rank, world_size=size)
group = dist.new_group(backend="gloo")
total = torch.tensor([rank + 1.0])
dist.all_reduce(total, group=group)
listens = [each.laddr.ip for each in psutil.Process().net_connections() if each.status == "LISTEN"]
dist.barrier()
print(json.dumps([total.item(), listens]))
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
