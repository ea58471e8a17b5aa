"""Processor time by file of tests: `pytest --processor-time FILE`, also with several processes (`-n 2`).

Counted are the process that runs the tests and all that descend from it: servers, which are forks of the fork server,
and programs, while they run and after they were waited for. What a shared server does while it waits goes to the file
that runs meanwhile; the start of a shared server goes to the first file that uses it. A process whose parent ended
without waiting for it is not counted.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import psutil
import pytest

COLLECTING = "(collecting the tests)"
FROM_WORKER = "processor_time"
SHOWN = 25


def processor_seconds(process: psutil.Process) -> float:
    """User and system time of a process and its descendants, with those that ended and were waited for."""
    total = 0.0
    for each in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = each.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


class ProcessorTime:
    """The plugin. `seconds`: by file."""

    def __init__(self, path: Path) -> None:
        self.path, self.seconds = path, defaultdict[str, float](float)
        self._process, self._before = psutil.Process(), 0.0

    def charge(self, what: str) -> None:
        """The time since the last call."""
        now = processor_seconds(self._process)
        self.seconds[what] += max(0.0, now - self._before)  # less: a process ended that nobody waited for
        self._before = now

    def pytest_collection_finish(self) -> None:
        self.charge(COLLECTING)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, Any, Any]:
        result = yield
        if nextitem is None or nextitem.path != item.path:
            self.charge(str(item.path.relative_to(item.config.rootpath)))
        return result

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """In a process of pytest-xdist, which runs a part of the files."""
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput[FROM_WORKER] = dict(self.seconds)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        for name, seconds in getattr(node, "workeroutput", {}).get(FROM_WORKER, {}).items():
            self.seconds[name] += seconds

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        table = self.table()
        self.path.write_text("".join(f"{line}\n" for line in table), encoding="utf-8")
        terminalreporter.section(f"processor time in seconds, the first {SHOWN} of {self.path}")
        for line in table[: SHOWN + 1]:
            terminalreporter.write_line(line)

    def table(self) -> list[str]:
        """The sum, then a line a file, the longest first: seconds, a tab, name."""
        rows = sorted(self.seconds.items(), key=lambda row: -row[1])
        return [f"{seconds:.1f}\t{name}" for name, seconds in [("(all)", sum(self.seconds.values())), *rows]]
