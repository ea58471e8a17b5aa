"""Names the process of a server of several ranks that has died.

Symbols (SGLang 0.5.23): `SubprocessWatchdog._processes` and `._names`, read. Reason: when a rank dies, the others fail
too, within milliseconds, since their connections to it end. A user must see which one was the first.
"""

from __future__ import annotations

import signal
from typing import Any, Protocol

from kt_runtime.ranks.failures import FAILED, SIGNALLED, Failure, cause_of
from kt_runtime.sglang_patch.ranks.looks import RANK, rank_names

SYMBOLS = ("sglang.srt.utils.watchdog.SubprocessWatchdog",)


class RankProcess(Protocol):
    """The part of multiprocessing.Process that is read."""

    @property
    def pid(self) -> int | None: ...

    @property
    def exitcode(self) -> int | None: ...


def described(watchdog: Any) -> str:
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
