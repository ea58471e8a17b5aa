"""A server's processes: their names, what the kernel says of one, and which rank died first.

Symbols (SGLang 0.5.23): `SubprocessWatchdog._processes` and `._names`, read. Reason for `first_death`: when a rank
dies, the others fail too, within milliseconds, since their connections to it end. A user must see which one was the
first.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kt_runtime.ranks.failures import FAILED, SIGNALLED, Failure, cause_of

SYMBOLS = ("sglang.srt.utils.watchdog.SubprocessWatchdog",)
SCHEDULER, RANK = "scheduler_", "rank "  # SGLang's name of a scheduler's process, before its number; ours of a rank's
STOPPED_STATES = (b"T", b"t")  # by a signal, by a debugger
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
    return Look(state in STOPPED_STATES, (user + system) / CLOCK_TICKS)


class RankProcess(Protocol):
    """The part of multiprocessing.Process that is read."""

    @property
    def pid(self) -> int | None: ...

    @property
    def exitcode(self) -> int | None: ...


def first_death(watchdog: Any) -> str:
    """ "rank 1 (process 123) has died: SIGKILL"; empty with one rank, or if none has ended yet.

    A rank that a signal has ended comes before ranks that ended with an error of their own.
    """
    names = rank_names(
        [(name, process.pid) for name, process in zip(watchdog._names, watchdog._processes, strict=True)]
    )
    ranks = zip(names, watchdog._processes, strict=True)
    cause = cause_of(filter(None, (death_of(name, process) for (name, _), process in ranks if name.startswith(RANK))))
    return "" if cause is None else cause.why


def death_of(name: str, process: RankProcess, host: str = "") -> Failure | None:
    """How the process ended; None while it lives. `host`: its name, where there are several."""
    status = process.exitcode
    if status is None:
        return None
    how = _signal_name(-status) if status < 0 else f"it ended with status {status}"
    return Failure(f"{placed(name, process.pid, host)} has died: {how}", SIGNALLED if status < 0 else FAILED)


def placed(name: str, pid: int | None, host: str = "") -> str:
    return f"{name} (process {pid}{f' on {host}' if host else ''})"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
