"""A process that ends a server whose frontend is stopped or hangs. It runs this file and the standard library alone.

No other process can do it. The frontend answers all clients and probes, and watches the server's other processes
(`sglang_patch/frontend/stalls.py`). While it is stopped, or its event loop waits for something that never comes,
clients get no answer, and a supervisor that waits for the server's exit status sees nothing.

The frontend's event loop sends a byte every half second (`guarded.py`). The guard looks at the frontend after each
`LOOK_SECONDS` without one. A look counts if the frontend could not have sent one: a signal has stopped it, or all of
its threads sleep. After `SILENT_LOOKS` of them the guard kills it. Then all connections end, which clients see as an
error, and the kernel ends the server's other processes.

However the frontend ends, if not by itself, the guard removes files that no later server would know of: what SGLang
keeps in shared memory under a random name.

A look does not count if any thread of the frontend computes or waits for a processor (the machine is busy), waits for a
disk (the kernel can't end it), or is stopped by a debugger. Looks are counted instead of time, since the guard is
stopped too after Ctrl-Z and in a frozen container.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys

LOOK_SECONDS = 1.0
SILENT_LOOKS = 10  # as long as requests wait for a scheduler that is stopped
STOPPED, ASLEEP = "T", "S"
ENDED = "ZX"  # threads in these states are no threads any more (proc_pid_stat(5))


class Silence:
    """Counts the looks at a process since its last beat."""

    def __init__(self, most_looks: int = SILENT_LOOKS) -> None:
        self._most_looks, self._looks = most_looks, 0

    def beat(self) -> None:
        self._looks = 0

    def look(self, states: str) -> str:
        """Why the process must be ended, else "". `states`: of its threads, a letter each, as proc_pid_stat(5) has it.

        A look at a process that could run takes one away, so a process that gets a processor now and then is not ended.
        """
        alive = set(states) - set(ENDED)
        if not alive or not alive <= {STOPPED, ASLEEP}:
            self._looks = max(self._looks - 1, 0)
            return ""
        self._looks += 1
        if self._looks < self._most_looks:
            return ""
        return "is stopped by a signal" if STOPPED in alive else "hangs: all of its threads sleep"


def thread_states(pid: int) -> str:
    """A letter for each thread of the process (proc_pid_stat(5)); none of one that has ended."""
    states = ""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except FileNotFoundError:
        return ""
    for thread in threads:
        stat = f"/proc/{pid}/task/{thread}/stat"
        with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(stat, "rb") as file:
            states += file.read().rpartition(b")")[2].split()[0].decode()
    return states


def guard(frontend: int, beats: int, look_s: float) -> None:
    """Returns once the process `frontend`, this process's parent, has ended or was killed. `beats`: a descriptor."""
    silence = Silence()
    select.select([beats], [], [])  # for the first beat: the event loop runs
    while os.getppid() == frontend:
        if select.select([beats], [], [], look_s)[0]:
            if not os.read(beats, 4096):
                return
            silence.beat()
        elif why := silence.look(thread_states(frontend)):
            sys.stderr.write(f"kt-runtime: the frontend (process {frontend}) {why}; the server ends\n")
            sys.stderr.flush()
            if os.getppid() == frontend:
                os.kill(frontend, signal.SIGKILL)
            return


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # sent to the whole group: the frontend decides
        signal.signal(number, signal.SIG_IGN)
    guard(int(sys.argv[1]), sys.stdin.fileno(), float(sys.argv[2]))
    for path in sys.argv[3:]:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
