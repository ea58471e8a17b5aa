"""Names the process of a server of several ranks that has died, from what SGLang's watchdog knows.

Symbols (SGLang 0.5.23): `SubprocessWatchdog._processes` and `._names`, read. Reason: when a rank dies, the others fail
too, within milliseconds, since their connections to it end. A user must see which one was the first.
"""

from __future__ import annotations

import signal
from typing import Any

from kt_runtime.sglang_patch.frontend.stalls import RANK, rank_names

SYMBOLS = ("sglang.srt.utils.watchdog.SubprocessWatchdog",)


def described(watchdog: Any) -> str:
    """ "rank 1 (process 123) has died: SIGKILL"; empty with one rank, or if none has ended yet.

    A rank that a signal has ended comes before ranks that ended with an error of their own.
    """
    names = rank_names(
        [(name, process.pid) for name, process in zip(watchdog._names, watchdog._processes, strict=True)]
    )
    ended = [
        (process.exitcode, f"{name} (process {pid})")
        for (name, pid), process in zip(names, watchdog._processes, strict=True)
        if process.exitcode is not None and name.startswith(RANK)
    ]
    if not ended:
        return ""
    status, who = min(ended)  # signals are negative
    how = _signal_name(-status) if status < 0 else f"it ended with status {status}"
    return f"{who} has died: {how}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
