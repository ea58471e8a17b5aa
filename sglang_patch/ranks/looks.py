"""The names of a server's processes, and what the kernel says of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import psutil

SCHEDULER, RANK = "scheduler_", "rank "  # SGLang's name of a scheduler's process, before its number; ours of a rank's
STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


def rank_names(processes: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """SGLang's names and process ids, where several schedulers are ranks."""
    if sum(name.startswith(SCHEDULER) for name, _ in processes) < 2:
        return list(processes)
    return [(name.replace(SCHEDULER, RANK), pid) for name, pid in processes]


@dataclass(frozen=True)
class Look:
    """What the kernel says of one process. `main_seconds`: processor time of its main thread."""

    stopped: bool
    main_seconds: float


def look_at(pid: int) -> Look | None:
    """None for a process that has ended: SGLang's watchdog takes care of it."""
    try:
        process = psutil.Process(pid)
        main = next((thread for thread in process.threads() if thread.id == pid), None)
        if main is None:
            return None
        return Look(process.status() in STOPPED, main.user_time + main.system_time)
    except psutil.Error:
        return None
