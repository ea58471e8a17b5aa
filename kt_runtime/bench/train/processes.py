"""Peak memory of processes since a reset (Linux: VmHWM, /proc/PID/clear_refs), which psutil does not know."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil


class ProcessTree:
    """All descendants of this process, which are the server's processes. Shared pages count for each process."""

    def __init__(self) -> None:
        self.processes = [child.pid for child in psutil.Process().children(recursive=True)]

    def reset(self) -> None:
        """Restarts the peaks from the current memory. If the system forbids that, peaks stay those since the start."""
        for process in self.processes:
            with suppress(OSError):
                Path(f"/proc/{process}/clear_refs").write_text("5")

    def peak_bytes(self) -> int:
        return sum(peak_bytes(process) for process in self.processes)


def peak_bytes(process: int) -> int:
    """The process's VmHWM in bytes; 0 for a process that has ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    return 0
