"""The processor time that `--processor-time` reports is that of all processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
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


@pytest.mark.slow
def test_time_of_children_counts_while_they_live_and_afterwards() -> None:
    before = processor_seconds(psutil.Process())
    command = [sys.executable, "-S", "-E", "-c", PROGRAM]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdin is not None
        assert child.stdout.readline() == "done\n"
        alive = processor_seconds(psutil.Process())
        child.stdin.close()
    ended = processor_seconds(psutil.Process())
    assert alive - before >= BURN_SECONDS - TICKS
    assert ended >= alive - TICKS


def test_files_are_listed_by_their_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spent = iter((2.0, 3.5, 3.0, 9.0))  # the third is less: a process ended that nobody waited for
    monkeypatch.setattr("reference.server.processor_time.processor_seconds", lambda _: next(spent))
    found = ProcessorTime(tmp_path / "times.tsv")
    for name in ("(collecting the tests)", "a.py", "b.py", "a.py"):
        found.charge(name)
    found.pytest_testnodedown(type("Node", (), {"workeroutput": {"processor_time": {"c.py": 4.0}}}))
    assert found.table() == ["13.5\t(all)", "7.5\ta.py", "4.0\tc.py", "2.0\t(collecting the tests)", "0.0\tb.py"]
