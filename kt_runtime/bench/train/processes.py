"""Peak memory of processes since a reset (Linux: VmHWM, /proc/PID/clear_refs)."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


class ProcessTree:
    """All descendants of this process, which are the server's processes. Shared pages count for each process."""

    def __init__(self) -> None:
        self.processes = _below(os.getpid())

    def reset(self) -> None:
        """Restarts the peaks from the current memory. If the system forbids that, peaks stay those since the start."""
        for process in self.processes:
            with suppress(OSError):
                Path(f"/proc/{process}/clear_refs").write_text("5")

    def peak_bytes(self) -> int:
        return sum(peak_bytes(process) for process in self.processes)


def _below(process: int) -> list[int]:
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has just ended
            after_name = stat.read_text(errors="replace").rpartition(")")[2].split()
            parents[int(stat.parent.name)] = int(after_name[1])
    found = [process]
    for one in found:  # `found` grows during the loop
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def peak_bytes(process: int) -> int:
    """The process's VmHWM in bytes; 0 for a process that has ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    return 0
