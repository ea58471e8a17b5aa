"""The names of a server's processes, and what the kernel says of one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SCHEDULER, RANK = "scheduler_", "rank "  # SGLang's name of a scheduler's process, before its number; ours of a rank's
STOPPED = (b"T", b"t")  # by a signal, by a debugger
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")  # a second


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
    """None for a process that has ended: SGLang's watchdog takes care of it.

    Reads one file, several times a second for each process; psutil reads one of each thread, of which ranks have 50.
    """
    try:
        text = Path(f"/proc/{pid}/task/{pid}/stat").read_bytes()
    except OSError:
        return None
    state, *numbers = text[text.rindex(b")") + 2 :].split()  # proc(5): the name before it may hold anything
    user, system = int(numbers[10]), int(numbers[11])
    return Look(state in STOPPED, (user + system) / CLOCK_TICKS)
