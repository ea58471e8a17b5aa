"""The processor time that `--processor-time` reports is that of all processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from reference.server.forks import family
from reference.server.processor_time import ProcessorTime, processor_seconds

BURN_SECONDS, TICKS = 0.3, 0.05  # the kernel counts in hundredths of a second
# A process computes in a child of its own, says so, and waits for its input to end.
PROGRAM = f"""
import os, sys, time
if not os.fork():
    while time.process_time() < {BURN_SECONDS}:
        pass
    os._exit(0)
os.wait()
print("done", flush=True)
sys.stdin.read()
"""


def test_time_of_children_counts_while_they_live_and_afterwards() -> None:
    before = processor_seconds()
    command = [sys.executable, "-S", "-E", "-c", PROGRAM]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdin is not None
        assert child.stdout.readline() == "done\n"
        alive = processor_seconds()
        child.stdin.close()
    ended = processor_seconds()
    assert alive - before >= BURN_SECONDS - TICKS
    assert ended >= alive - TICKS


# Two children with a child each, all of which wait for the input to end.
FORK_SERVERS = """
import os, sys
servers = []
for _ in range(2):
    reading, writing = os.pipe()
    servers.append(os.fork())
    if not servers[-1]:
        child = os.fork()
        if child:
            os.write(writing, b"%d" % child)
        sys.stdin.read()
        os._exit(0)
    servers.append(int(os.read(reading, 20)))
print(*servers, flush=True)
sys.stdin.read()
"""


def test_a_fork_server_of_another_process_serves_that_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before and after the end of the process that both are forks of."""
    command = [sys.executable, "-S", "-E", "-c", FORK_SERVERS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as imported:
        assert imported.stdout is not None
        own, served, other, other_served = map(int, imported.stdout.readline().split())
        trees = {imported.pid, own, served, other, other_served}

        def found() -> set[int]:
            return {each.pid for each in family.processes()} & trees

        assert found() == trees
        monkeypatch.setattr(family, "_shared", (imported.pid, own))
        assert found() == {imported.pid, own, served}
        imported.kill()
        imported.wait()
        assert found() == {own, served}


def test_files_are_listed_by_their_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spent = iter((2.0, 3.5, 3.0, 9.0))  # the third is less: a process ended that nobody waited for
    monkeypatch.setattr("reference.server.processor_time.processor_seconds", lambda: next(spent))
    found = ProcessorTime(tmp_path / "times.tsv")
    for name in ("(collecting the tests)", "a.py", "b.py", "a.py"):
        found.charge(name)
    found.pytest_testnodedown(type("Node", (), {"workeroutput": {"processor_time": {"c.py": 4.0}}}))
    assert found.table() == ["13.5\t(all)", "7.5\ta.py", "4.0\tc.py", "2.0\t(collecting the tests)", "0.0\tb.py"]
