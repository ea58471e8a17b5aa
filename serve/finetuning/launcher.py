"""Becomes the trainer's process: `python -m kt_runtime.serve.finetuning.launcher PARENT ARGUMENTS...`.

The kernel ends it with SIGKILL when the server's process ends, however that happens (prctl(2)): a trainer without its
server can do nothing, and one that still ran during the next server's life would disturb the resumed job. The setting
stays through exec. It is made here, in a process of one thread, and not between the server's fork and exec.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

SET_PARENT_DEATH_SIGNAL = 1


def main() -> None:
    parent, *arguments = sys.argv[1:]
    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, int(signal.SIGKILL))
    if os.getppid() != int(parent):  # it ended before the call
        sys.exit(1)
    os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    main()
